"""The parts of `python -m benchmarks.soak` that decide whether a run has passed, and its clients
against the real API before a fake rank."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from actors.telemetry.telemetry import Telemetry
from benchmarks.fuzz.requests import Maker
from benchmarks.soak import answers, clients, report, verdict
from benchmarks.soak.clients import Clients
from benchmarks.soak.served import KEYS
from benchmarks.soak.traffic import HonestAnswer, Kind, Tally, Traffic
from benchmarks.soak.verdict import MINUTE_S
from benchmarks.soak.watch import Sample, Told, read_metrics
from contracts import metrics
from contracts.config import HttpConfig
from tests.support.api_harness import MODEL, Api, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import CHATML, write_byte_level

MIB = 1 << 20
VISITS = 6
KINDS = [kind.name for kind in Clients(("", 0), None, Tally()).kinds(1.0)]  # type: ignore[arg-type]
HOUR_S = 60 * MINUTE_S


def samples(*sizes_mib: float, every_s: float = MINUTE_S) -> list[Sample]:
    return [Sample(n * every_s, int(size * MIB), 20, 10) for n, size in enumerate(sizes_mib)]


def test_memory_that_grows_in_the_first_ten_minutes_only_is_flat() -> None:
    warm = [200 + 10 * minute for minute in range(10)]
    assert verdict.memory_faults({"ingress": samples(*warm, *[300] * 51)}, HOUR_S) == []


def test_memory_that_goes_on_growing_is_a_fault_that_names_the_process() -> None:
    leak = samples(*[300 + minute for minute in range(61)])
    (fault,) = verdict.memory_faults({"ingress": leak}, HOUR_S)
    assert "ingress" in fault
    assert "14." in fault  # 357.5 of 312.5 MiB


def test_a_single_spike_is_no_growth() -> None:
    sizes = [300.0] * 61
    sizes[58] = 900
    assert verdict.memory_faults({"ingress": samples(*sizes)}, HOUR_S) == []


def test_a_short_run_shows_its_quarters_and_is_not_judged() -> None:
    growing = samples(*range(100, 200, 10), every_s=40.0)
    assert verdict.growth_fraction(growing, 400.0) > verdict.FLAT_FRACTION
    assert verdict.memory_faults({"ingress": growing}, 400.0) == []
    assert verdict.windows(400.0) == ((100.0, 200.0), (300.0, 400.0))
    assert verdict.windows(HOUR_S) == ((600.0, 900.0), (3300.0, 3600.0))


def test_descriptors_and_threads_must_go_back() -> None:
    start = {"a": Sample(0, 0, 20, 10), "b": Sample(0, 0, 20, 10)}
    end = {"a": Sample(9, 0, 24, 18), "b": Sample(9, 0, 25, 19)}
    assert [fault.split()[0] for fault in verdict.leftover_faults(start, end)] == ["b", "b"]


def test_blocks_that_stay_in_use_or_are_lost_and_replaced_ranks_are_faults() -> None:
    start = Told(0, {"r": {"free": 10, "used": 0, "cached": 0}}, 0, 0)
    assert verdict.block_faults(start, Told(9, {"r": {"free": 4, "cached": 6}}, 0, 0)) == []
    used = Told(9, {"r": {"free": 4, "cached": 5, "used": 1}}, 0, 0)
    assert "in use" in verdict.block_faults(start, used)[0]
    lost = Told(9, {"r": {"free": 4, "cached": 5}}, 0, 1)
    assert [fault.split()[0] for fault in verdict.block_faults(start, lost)] == ["r", "1"]


def test_what_a_server_tells_is_read_from_its_metrics() -> None:
    telemetry = Telemetry()
    telemetry.set(metrics.KV_BLOCKS, "attention-0", "free", to=7)
    telemetry.set(metrics.REQUESTS_WAITING, "prefill", "ls", to=2)
    telemetry.set(metrics.REQUESTS_WAITING, "prefill", "be", to=3)
    telemetry.count(metrics.RANK_RESTARTS, "attention")
    told = read_metrics(telemetry.exposition(), 1.0)
    assert told == Told(1.0, {"attention-0": {"free": 7}}, 5, 1)


def test_latencies_are_told_per_minute() -> None:
    honest = [HonestAnswer(10.0, 0.1), HonestAnswer(20.0, 0.1), HonestAnswer(130.0, 0.5)]
    assert report.latencies_ms(honest, 10.0) == [[0, 2, 100, 100, 100], [2, 1, 500, 500, 500]]


@pytest.mark.parametrize("count", [1, 7, 180, 181, 1000])
def test_a_curve_keeps_few_points_and_its_last(count: int) -> None:
    kept = report.condensed(range(count))
    assert 0 < len(kept) <= report.MOST_POINTS
    assert kept[-1] == count - 1


def test_a_whole_answer_and_its_stream_say_the_same() -> None:
    whole = b'{"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}'
    chunks = [
        b'{"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": null}]}',
        b'{"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": null}]}',
        b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
        b"[DONE]",
    ]
    stream = b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks)
    assert answers.said(stream) == answers.said(whole) == [["ab", "stop"]]
    with pytest.raises(ValueError, match="ends with"):
        answers.said(stream[: stream.index(b"data: [DONE]")])


def test_only_the_last_decimal_of_a_probability_may_turn() -> None:
    assert answers.same([["no", [0.123]]], [["no", [0.124]]])
    assert not answers.same([["no", [0.123]]], [["no", [0.126]]])
    assert not answers.same([["yes", [0.123]]], [["no", [0.123]]])
    assert not answers.same([["no", [0.1]]], [["no", [0.1, 0.1]]])


def test_traffic_comes_at_its_rate_and_what_fails_is_told() -> None:
    tally = Tally()

    async def visit(dice: random.Random) -> str:
        return "!wrong" if dice.random() < 0.5 else "right"

    async def broken(dice: random.Random) -> str:
        raise ConnectionResetError

    kinds = [Kind("honest", 500.0, visit), Kind("bad", 500.0, broken)]

    async def run() -> None:
        traffic = Traffic(kinds, tally, seed=1)
        await traffic.run(0.2)
        await traffic.drain(1.0)

    asyncio.run(run())
    assert set(tally.outcomes) == {"honest", "bad"}
    assert set(tally.outcomes["honest"]) == {"!wrong", "right"}
    assert tally.outcomes["bad"].keys() == {"ConnectionResetError"}
    assert set(tally.fatal) == {"honest: wrong"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template=CHATML)


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    http = HttpConfig(api_keys=list(KEYS), max_body_bytes=1 << 20)
    rank = FakeRank("attention-0", lambda submit: [60, 61, 62])
    with serve_api(folder, [rank], http) as api:
        yield api


@pytest.fixture
def visitors(api: Api, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Clients of `api` who are in a hurry."""
    monkeypatch.setattr(answers, "BUNDLED", MODEL)
    for name in ("IDLE_S", "UNREAD_S", "STRANGER_S"):
        monkeypatch.setattr(clients, name, 0.05)
    monkeypatch.setattr(clients, "BYTE_EVERY_S", 0.0)
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    document = msgspec.json.decode(api.http.get("/openapi.json").content)
    visitors = Clients((parts.hostname, parts.port), Maker(1, document, MODEL, None), Tally())
    visitors.ports = [parts.port]
    return visitors


@pytest.mark.parametrize("name", KINDS)
def test_clients_of_each_kind_come_and_go(api: Api, visitors: Clients, name: str) -> None:
    """Nothing fails, and afterwards an honest one is answered."""
    api.loop.run(visitors.learn())
    (kind,) = (kind for kind in visitors.kinds(1.0) if kind.name == name)
    for number in range(VISITS):
        outcome = api.loop.run(kind.visit(random.Random(f"{name} {number}")))
        assert not outcome.startswith("!"), outcome
    assert api.loop.run(visitors.honest(random.Random(1))) in ("right", "answered")


def test_an_answer_that_is_not_as_at_the_start_is_told(api: Api, visitors: Clients) -> None:
    api.loop.run(visitors.learn())
    visitors.expected = [(path, body, "else") for path, body, _ in visitors.expected]
    told = [api.loop.run(visitors.honest(random.Random(number))) for number in range(20)]
    assert any(outcome.startswith("!") and "at the start" in outcome for outcome in told)
    assert "answered" in told


def test_what_a_server_answers_with_a_500_is_told(api: Api, visitors: Clients) -> None:
    api.loop.run(visitors.learn())
    api.rank.fail_with = ("planted", "internal_error", 500)
    try:
        told = api.loop.run(visitors.honest(random.Random(3)))
        assert told.startswith("!status 500"), told
    finally:
        api.rank.fail_with = None
