"""`tandem bench` with servers that answer, fail, or do not answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import main
from cluster.http.server import free_port
from cluster.tools.bench.bench import BenchSettings, HttpLoadGenerator, LoadTarget, bench
from cluster.tools.bench.workload import (
    Lengths,
    RequestArrival,
    RequestResult,
    always,
    chat_lengths,
    fit_trace,
    from_trace,
    poisson,
    read_trace,
    summarize,
)
from contracts.errors import ConfigError
from contracts.requests import Priority
from tests.support.api_harness import MODEL, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.one_line_errors import error_line

LS, BE = Priority.LS, Priority.BE
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer, models: Any = None) -> Iterator[str]:
    """Start a server whose POST handler is `answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(models or {"data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join(5.0)


def stream(*lines: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

    return answer


def refuses(status: int, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("content-length", "0")
        request.end_headers()

    return answer


def one(url: str, **changes: Any) -> RequestResult:
    outcome = RequestResult(RequestArrival(0.0, LS, Lengths(4, 2)))
    target = LoadTarget(url=url, model="m", **changes)
    asyncio.run(HttpLoadGenerator(target, 1).run([outcome], timeout_s=2.0))
    return outcome


def test_tandem_server_is_measured_with_its_token_count(folder: Path) -> None:
    rank = FakeRank("attention-0", lambda submit: [60, 61, 62])
    with serve_api(folder, [rank]) as api:
        found = bench(
            BenchSettings(
                url=api.url, rate=200.0, seconds=0.2, ls=0.5, prompt_tokens=4, output_tokens=3
            ),
            lambda ended, of: None,
        )
    assert found.model == MODEL
    assert found.all.answered == found.all.requests > 10
    assert found.all.ttft_ms.p50 is not None
    assert found.all.tokens_per_s > 0
    assert sum(each.requests for each in found.by_class.values()) == found.all.requests
    assert {each.usage_tokens for each in found.outcomes} == {3}


def test_first_piece_of_chat_is_not_a_token() -> None:
    role = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
    word = 'data: {"choices": [{"delta": {"content": "a"}}]}'
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'
    with server(stream(role, word, word, usage, "data: [DONE]")) as url:
        outcome = one(url, path="/v1/chat/completions")
    assert outcome.error == ""
    assert (len(outcome.tokens_s), outcome.tokens) == (2, 5)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (stream('data: {"choices": [{"text": "a"}]}'), "the answer has no end"),
        (stream("data: [DONE]"), "the answer has no tokens"),
        (stream('data: {"choices": 7}'), "no chunk: "),
        (stream("data: {" + "[" * 100_000), "no chunk: "),
        (stream('data: {"error": {"message": "broken"}}', "data: [DONE]"), "{'message': 'broken'}"),
        (refuses(429, retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), "429"),
        (refuses(500), "500"),
    ],
)
def test_any_server_answer_is_reported_in_one_line(answer: Answer, error: str) -> None:
    with server(answer) as url:
        outcome = one(url)
    assert outcome.error.startswith(error)
    assert len(outcome.error) < 200
    assert outcome.end_s >= outcome.sent_s
    assert summarize([outcome]).answered == 0


def test_requests_beyond_max_open_are_not_sent_and_reported() -> None:
    leave = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        leave.wait(5.0)

    outcomes = [RequestResult(RequestArrival(0.0, LS, Lengths(4, 2))) for _ in range(3)]
    with server(answer) as url:
        generator = HttpLoadGenerator(LoadTarget(url=url, model="m"), 1, max_open=2)
        asyncio.run(generator.run(outcomes, timeout_s=0.2))
        leave.set()
    assert [each.error for each in outcomes[:2]] == ["ReadTimeout"] * 2
    assert outcomes[2].error == "not sent: 2 requests were open"


def test_trace_format_follows_file_ending(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 7, "output_length": 0}\n'
        '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n'
    )
    assert read_trace(path) == [(0.0, Lengths(6758, 500)), (2.0, Lengths(7, 1))]


@pytest.mark.parametrize(
    ("name", "text", "expected_text"),
    [
        ("a.txt", "", "end its name in .csv or .jsonl"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "[" * 100_000 + "\n", "row 1"),
        ("a.jsonl", '{"timestamp": "x", "input_length": 1}\n', "row 1"),
        ("a.jsonl", '{"timestamp": 1, "input_length": -5, "output_length": 1}\n', "row 1: times"),
        ("a.jsonl", "x" * ((1 << 20) + 5), "a line of over"),
        ("a.csv", "a,b\n1,2\n", "no column"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "row 1"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "row 1"),
    ],
)
def test_invalid_trace_is_reported_with_its_row(
    tmp_path: Path, name: str, text: str, expected_text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert expected_text in raised.value.message
    assert str(path) in raised.value.message or "no column" in expected_text
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["--url", "localhost:8000"], "begin it with http"),
        (["--rate", "nan"], "--rate nan: give a number above 0"),
        (["--rate", "1e9"], "at most 1000000"),
        (["--rate", "1e-9"], "no request arrives"),
        (["--ls", "2"], "--ls 2.0: give a part"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0: give 1 to"),
        (["--set", "temperature"], "--set temperature: give FIELD=VALUE"),
        (["--trace", "missing.csv"], "cannot be read"),
        (["--picture", "a.bmp"], "end its name in one of"),
        ([], "no answer: "),
    ],
)
def test_invalid_arguments_are_one_line_without_requests(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected_text: str
) -> None:
    url = [] if "--url" in arguments else ["--url", f"http://127.0.0.1:{free_port()}"]
    assert expected_text in error_line(capsys, "bench", *url, *arguments)


def test_table_json_picture_and_file_agree(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = FakeRank("attention-0", lambda submit: [60, 61])
    with serve_api(folder, [rank]) as api:
        command = ["bench", "--url", api.url, "--rate", "100", "--seconds", "0.2", "--chat"]
        command += ["--prompt-tokens", "4", "--output-tokens", "2"]
        assert main([*command, "--json", "--output", str(tmp_path / "all.json")]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main([*command, "--picture", str(tmp_path / "times.svg")]) == 0
    assert answer["all"]["answered"] == answer["all"]["requests"]
    written = json.loads((tmp_path / "all.json").read_text())
    assert len(written["outcomes"]) == answer["all"]["requests"]
    assert "time to first token" in capsys.readouterr().out
    assert (tmp_path / "times.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"id": 7}]}, [1], {"no": 1}])
def test_server_without_model_name_needs_model_option(
    capsys: pytest.CaptureFixture[str], models: Any
) -> None:
    with server(refuses(500), models) as url:
        assert main(["bench", "--url", url]) == 2
    assert "give --model" in capsys.readouterr().err


def test_poisson_arrivals_have_requested_rate_and_class_share() -> None:
    arrivals = poisson(20.0, 500.0, chat_lengths(), 0.2, random.Random(1))
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert sum(a.priority is LS for a in arrivals) == pytest.approx(2_000, rel=0.1)
    times = [a.at_s for a in arrivals]
    assert times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    assert not poisson(0.0, 10.0, always(1, 1), 1.0, random.Random(1))


def test_scaled_trace_keeps_its_pattern(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,400,40\n"
        "2023-11-16 18:15:47.6805900,20,0\n"
        "2023-11-16 18:15:50.6805900,1000,70\n"
    )
    rows = read_trace(path)
    assert [at_s for at_s, _ in rows] == pytest.approx([0, 1, 4])
    arrivals = from_trace(fit_trace(rows, seconds=8.0, rate=3 / 8, divisor=10), ls=1.0, seed=1)
    assert [a.at_s for a in arrivals] == pytest.approx([0, 2, 8])
    assert [a.lengths for a in arrivals] == [Lengths(40, 4), Lengths(4, 1), Lengths(100, 7)]


def test_requests_are_sent_on_arrival_and_refused_client_retries_once(folder: Path) -> None:
    """The rank never answers and two requests may wait; later ones are not delayed."""
    rank = FakeRank("attention-0", lambda submit: [60])
    rank.hold_after = 0
    outcomes = [
        RequestResult(RequestArrival(0.1 * number, LS, Lengths(4, 1))) for number in range(4)
    ]
    with serve_api(folder, [rank], max_waiting=2) as api:
        generator = HttpLoadGenerator(
            LoadTarget(url=api.url, model=MODEL, fields={"ignore_eos": True}),
            1,
            retries_refused=True,
        )
        asyncio.run(generator.run(outcomes, timeout_s=4.0))
    assert all(0 <= each.sent_s - each.arrival.at_s < 3 for each in outcomes)
    assert [each.error for each in outcomes] == ["ReadTimeout", "ReadTimeout", "429", "429"]
    assert all(each.retry_s for each in outcomes[2:])
    assert [each.error for each in generator.retries] == ["429", "429"]
