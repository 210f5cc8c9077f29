"""`tandem bench` with servers that answer, fail, or do not answer."""

import asyncio
import gzip
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
from cluster.tools.bench.bench import bench
from cluster.tools.bench.datasets import Lengths, TraceRow, Turn, read_conversations, read_trace
from cluster.tools.bench.load_generator import BenchSettings, HttpLoadGenerator
from cluster.tools.bench.workload import (
    BlockPrompt,
    RequestArrival,
    RequestResult,
    always,
    chat_lengths,
    from_trace,
    poisson,
    prompt_text,
    summarize,
)
from contracts.errors import ConfigError
from contracts.requests import Priority
from tests.support.api_harness import MODEL, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.one_line_errors import error_line, one_line_error

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
            self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
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
    settings = BenchSettings(url=url, timeout_s=2.0, **changes)
    asyncio.run(HttpLoadGenerator(settings, "m").run([[outcome]]))
    return outcome


def test_tandem_server_is_measured_with_its_token_count(folder: Path) -> None:
    rank = FakeRank()
    with serve_api(folder, [rank]) as api:
        found = bench(
            BenchSettings(
                url=api.url, rate=200.0, seconds=0.2, ls=0.5, prompt_tokens=4, output_tokens=3
            ),
            lambda ended, of: None,
        )
    assert found.model == MODEL
    assert found.all.completed == found.all.num_prompts > 10
    assert found.all.ttft.p50 is not None
    assert found.all.output_throughput > 0
    assert sum(each.num_prompts for each in found.by_class.values()) == found.all.num_prompts
    assert {each.usage_tokens for each in found.outcomes} == {3}
    assert found.all.requested_input_tokens == 4 * found.all.num_prompts
    assert found.all.total_input_tokens == sum(each.prompt_tokens for each in found.outcomes)


def test_first_piece_of_chat_is_not_a_token() -> None:
    role = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
    word = 'data: {"choices": [{"delta": {"content": "a"}}]}'
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'
    with server(stream(role, word, word, usage, "data: [DONE]")) as url:
        outcome = one(url, chat=True)
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
    assert summarize([outcome]).completed == 0


def test_requests_beyond_max_open_are_not_sent_and_reported() -> None:
    leave = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        leave.wait(5.0)

    outcomes = [RequestResult(RequestArrival(0.0, LS, Lengths(4, 2))) for _ in range(3)]
    with server(answer) as url:
        settings = BenchSettings(url=url, timeout_s=0.2)
        generator = HttpLoadGenerator(settings, "m", max_open=2)
        asyncio.run(generator.run([[each] for each in outcomes]))
        leave.set()
    assert [each.error for each in outcomes[:2]] == ["ReadTimeout"] * 2
    assert outcomes[2].error == "not sent: 2 requests were open"


MOONCAKE = (
    '{"timestamp": 3000, "input_length": 7, "output_length": 0}\n\n'
    '{"timestamp": 1000, "input_length": 600, "output_length": 500, "hash_ids": [0, 4]}\n'
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_trace_format_follows_file_ending(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(
        gzip.compress(MOONCAKE.encode()) if path.suffix == ".gz" else MOONCAKE.encode()
    )
    assert read_trace(path, 512) == [(0.0, Lengths(600, 500), (0, 4)), (2.0, Lengths(7, 1), ())]


@pytest.mark.parametrize(
    ("name", "text", "expected_text"),
    [
        ("a.txt", "", "end its name in .csv or .jsonl"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "[" * 100_000 + "\n", "row 1"),
        ("a.jsonl", '{"timestamp": "x", "input_length": 1}\n', "row 1"),
        ("a.jsonl", "\n" + MOONCAKE[:40], "row 2: "),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": -5, "output_length": 1}\n',
            "row 1: Expected",
        ),
        ("a.jsonl", '{"timestamp": 1, "input_length": 9e6, "output_length": 1}', "row 1: Expected"),
        ("a.jsonl", MOONCAKE.replace("[0, 4]", "[0]"), "row 3: 1 hash_ids, but input_length 600"),
        ("a.jsonl", "x" * ((1 << 22) + 5), "row 1: over 4194304 characters"),
        ("a.jsonl.gz", MOONCAKE, "cannot be read: Not a gzipped file"),
        ("a.csv", "a,b\n1,2\n", "row 1: Object missing required field `TIMESTAMP`"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "row 1"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "row 1"),
        ("a.csv", f"TIMESTAMP\n{'x' * 200_000}\n", "row 1: field larger than"),
    ],
)
def test_invalid_trace_is_reported_with_its_row(
    tmp_path: Path, name: str, text: str, expected_text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with one_line_error(ConfigError, expected_text, start=f"--trace {path}: "):
        read_trace(path, 512)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [
    {"conversations": [{"from": "gpt", "value": "Welcome."}]},
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "gpt", "value": "Welcome."},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b c"},
            {"from": "human", "value": "d"},
        ]
    },
]
CHAT = {"messages": [user("a"), {"role": "assistant", "content": None}, user("d")]}


@pytest.mark.parametrize(
    ("name", "text", "turns", "left_out"),
    [
        (
            "a.json",
            json.dumps(SHAREGPT),
            [Turn([SYSTEM, user("a")], "b c"), Turn([user("d")], "")],
            [1],
        ),
        ("a.jsonl", json.dumps(CHAT), [Turn([user("a")], ""), Turn([user("d")], "")], []),
        ("a.jsonl", '{"prompt": "a b"}\n"c"', [Turn([user("a b")], "")], []),
        ("a.txt", "\na b\nc\n", [Turn([user("a b")], "")], []),
    ],
)
def test_conversations_are_read_as_turns(
    tmp_path: Path, name: str, text: str, turns: list[Turn], left_out: list[int]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_conversations(path, 1) == ([turns], left_out)


@pytest.mark.parametrize(
    ("name", "text", "expected_text"),
    [
        ("a.md", "", "end its name in .json or .jsonl or .txt"),
        ("a.txt", "\n", "has no rows; give"),
        ("a.jsonl", json.dumps(SHAREGPT[0]), "row 1: has no turn of a user; give"),
        ("a.jsonl", '"a"\n{"conversations": {}}', "row 2: give a list in conversations"),
        ("a.jsonl", '{"messages": [7]}', "row 1: give each message a role"),
        ("a.jsonl", '{"messages": [{"role": "tool"}]}', "row 1: give each message a role"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "row 1: give the message of user its text"),
        ("a.json", json.dumps(CHAT), "row 1: Expected `array`, got `object`"),
    ],
)
def test_invalid_conversation_is_reported_with_its_row(
    tmp_path: Path, name: str, text: str, expected_text: str
) -> None:
    (tmp_path / name).write_text(text)
    with one_line_error(ConfigError, expected_text, start=f"--conversations {tmp_path / name}: "):
        read_conversations(tmp_path / name, 9)


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
        (["--think-time-s", "nan"], "--think-time-s nan: give 0 to"),
        (["--goodput", "ttft:500", "e2e:5"], "--goodput e2e:5: give NAME:MILLISECONDS with one of"),
        (["--goodput", "ttft:inf"], "--goodput ttft:inf: give NAME"),
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


@pytest.mark.long
def test_table_json_picture_and_file_agree(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = FakeRank("attention-0", lambda submit: [60, 61])
    with serve_api(folder, [rank]) as api:
        command = ["bench", "--url", api.url, "--rate", "100", "--seconds", "0.2", "--chat"]
        command += [
            "--prompt-tokens",
            "4",
            "--output-tokens",
            "2",
            "--goodput",
            "ttft:9e9 e2el:9e9",
        ]
        assert main([*command, "--json", "--output", str(tmp_path / "all.json")]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main([*command, "--picture", str(tmp_path / "times.svg")]) == 0
    requests = answer["num_prompts"]
    assert (answer["completed"], answer["failed"], answer["model_id"]) == (requests, 0, MODEL)
    assert answer["request_goodput"] == answer["request_throughput"] > 0
    assert answer["total_output_tokens"] == 2 * requests
    assert 0 < answer["median_ttft_ms"] <= answer["p99_ttft_ms"] <= answer["p99_e2el_ms"]
    written = json.loads((tmp_path / "all.json").read_text())
    assert {**answer, "date": ""} == {key: written[key] for key in answer} | {"date": ""}
    assert len(written["ttfts"]) == len(written["itls"]) == len(written["errors"]) == requests
    output = capsys.readouterr().out
    assert "time to first token" in output
    assert "requests/s, 100.0 %" in output
    assert (tmp_path / "times.svg").read_text().startswith("<?xml")


def test_refused_and_late_requests_are_not_good() -> None:
    def outcome(error: str, first_s: float, last_s: float, priority: Priority) -> RequestResult:
        return RequestResult(
            RequestArrival(1.0, priority, Lengths(4, 3)),
            sent_s=1.0,
            tokens_s=[first_s, last_s],
            end_s=last_s,
            error=error,
            usage_tokens=3,
        )

    outcomes = [outcome("", 1.2, 1.4, LS), outcome("", 1.2, 3.0, BE), outcome("429", 1.1, 1.1, LS)]
    for objectives, good in (
        ({"ttft": 250.0}, [True, True, False]),
        ({"ttft": 150.0}, [False] * 3),
        ({"ttft": 250.0, "tpot": 101.0}, [True, False, False]),
        ({"e2el": 2000.0}, [True, True, False]),
    ):
        assert [each.meets(objectives) for each in outcomes] == good
    found = summarize(outcomes, {"ttft": 250.0, "tpot": 101.0})
    assert (found.completed, found.failed, found.error_counts) == (2, 1, {"429": 1})
    assert found.request_goodput == pytest.approx(1 / 2.0)
    assert found.good_request_fraction == pytest.approx(1 / 3)
    assert summarize(outcomes).request_goodput is None
    assert found.ttft.std == pytest.approx(0.0, abs=1e-6)


def test_turns_follow_answers_and_carry_them(tmp_path: Path) -> None:
    """The recorded answer gives the length; the third turn fails, so the fourth is not sent."""
    bodies: list[dict[str, Any]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        bodies.append(vars(request)["body"])
        number = len(bodies)
        word = json.dumps({"choices": [{"delta": {"content": f"answer {number}"}}]})
        usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 10 * number}})
        stream(f"data: {word}", f"data: {usage}", "data: [DONE]" if number < 3 else "")(request)

    lines = [("human", "a"), ("gpt", "x y z"), ("human", "b"), ("human", "c"), ("gpt", "x")]
    lines += [("human", "d"), ("gpt", "x"), ("human", "e")]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": f, "value": v} for f, v in lines]}))
    with server(answer) as url:
        settings = BenchSettings(
            url=url, rate=1.0, seconds=1.0, seed=1, conversations=path, think_time_s=0.05
        )  # one arrival, after 0.14 s
        found = bench(settings, lambda ended, of: None)
    history = [user("a"), {"role": "assistant", "content": "answer 1"}, user("b"), user("c")]
    assert [body["messages"] for body in bodies[:2]] == [history[:1], history]
    assert bodies[2]["messages"][4:] == [{"role": "assistant", "content": "answer 2"}, user("d")]
    assert [body["max_tokens"] for body in bodies[:2]] == [3, 1]
    first, second, third, fourth = found.outcomes
    assert second.sent_s >= first.end_s + 0.05
    assert second.ttft_s < second.end_s - first.end_s
    assert (second.repeated_tokens, second.prompt_tokens) == (10, 20)
    assert third.error == "the answer has no end"
    assert fourth.error == "not sent: an earlier turn failed"


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
    rows = read_trace(path, 512)
    assert [row.at_s for row in rows] == pytest.approx([0, 1, 4])
    arrivals = scaled(rows, seconds=8.0, divisor=10)
    assert [a.at_s for a in arrivals] == pytest.approx([0, 2, 8])
    assert [a.lengths for a in arrivals] == [Lengths(40, 4), Lengths(4, 1), Lengths(100, 7)]


def scaled(rows: list[TraceRow], seconds: float, divisor: int) -> list[RequestArrival]:
    rng = random.Random(1)
    return from_trace(rows, seconds=seconds, divisor=divisor, block_tokens=512, ls=1.0, rng=rng)


@pytest.mark.parametrize("divisor", [1, 10, 512])
def test_equal_hash_ids_are_equal_blocks_of_text(divisor: int) -> None:
    """Words are tokens: common starts of the texts are as long as the trace predicts."""
    rows = [
        TraceRow(0.0, Lengths(1100, 1), (7, 1, 2)),
        TraceRow(1.0, Lengths(1500, 1), (7, 1, 3)),
        TraceRow(2.0, Lengths(1024, 1), (8, 1)),  # 1 after another block is no prefix
        TraceRow(3.0, Lengths(100, 1), (7,)),
    ]
    size, words = 512 // divisor, list[list[str]]()
    for arrival in scaled(rows, 3.0, divisor):
        assert isinstance(arrival.prompt, BlockPrompt)
        words.append(prompt_text(arrival.prompt, arrival.lengths.prompt, seed=3).split())
        assert len(words[-1]) == arrival.lengths.prompt
        assert prompt_text(arrival.prompt, arrival.lengths.prompt, seed=4).split() != words[-1]
        tokens = min(len(words[-1]), 2 * size if len(words) == 2 else size)
        assert arrival.prompt.repeated_tokens == (0 if len(words) in (1, 3) else tokens)
    assert words[0][: 2 * size] == words[1][: 2 * size]
    assert words[2][size:] == words[0][size : 2 * size]
    assert words[3] == words[0][: len(words[3])]


@pytest.mark.long
def test_requests_are_sent_on_arrival_and_refused_client_retries_once(folder: Path) -> None:
    """The rank never answers and two requests may wait; later ones are not delayed."""
    rank = FakeRank("attention-0", lambda submit: [60])
    rank.hold_after = 0
    outcomes = [
        RequestResult(RequestArrival(0.1 * number, LS, Lengths(4, 1))) for number in range(4)
    ]
    with serve_api(folder, [rank], max_waiting=2) as api:
        settings = BenchSettings(
            url=api.url, ls=1.0, timeout_s=4.0, retry_refused=True, fields={"ignore_eos": True}
        )
        generator = HttpLoadGenerator(settings, MODEL)
        asyncio.run(generator.run([[each] for each in outcomes]))
    assert all(0 <= each.sent_s - each.arrival.at_s < 3 for each in outcomes)
    assert [each.error for each in outcomes] == ["ReadTimeout", "ReadTimeout", "429", "429"]
    assert all(each.retry_s for each in outcomes[2:])
    assert [each.error for each in generator.retries] == ["429", "429"]
