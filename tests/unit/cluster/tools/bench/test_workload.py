"""Arrivals, and the open-loop load generator over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from pathlib import Path

import pytest

from benchmarks.load.figures import figures
from cluster.tools.bench.load_generator import HttpLoadGenerator, LoadTarget
from cluster.tools.bench.outcome import RequestResult, percentile
from cluster.tools.bench.workload import (
    Lengths,
    RequestArrival,
    always,
    chat_lengths,
    fit_trace,
    from_trace,
    poisson,
    read_trace,
)
from contracts.requests import Priority
from tests.support.api_harness import MODEL, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level

LS, BE = Priority.LS, Priority.BE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


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


def test_latencies_count_from_arrival() -> None:
    arrival = RequestArrival(1.0, LS, Lengths(8, 3))
    late = RequestResult(arrival, sent_s=1.5, tokens_s=[2.0, 2.25, 2.75], end_s=3.0)
    refused = RequestResult(arrival, error="429", retry_s=4.0)
    of_be = RequestResult(arrival._replace(priority=BE))
    found = figures([late, refused, of_be], LS, seconds=10.0)
    assert (found["requests"], found["failed"]) == (2, 1)
    assert found["ttft_ms"] == found["ttft_p99_ms"] == pytest.approx(1000)
    assert found["tbt_ms"] == pytest.approx(375)
    assert found["turnaround_s"] == pytest.approx(2)
    assert found["jobs_per_s"] == pytest.approx(0.1)


def test_percentile_is_an_observed_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(100)), 0.99) == 98
    assert math.isnan(percentile([], 0.5))


def test_requests_are_sent_on_arrival_and_refused_client_retries_once(
    folder: Path,
) -> None:
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


def test_truncated_answer_is_an_error(folder: Path) -> None:
    rank = FakeRank("attention-0", lambda submit: [60])
    whole, lost = (RequestResult(RequestArrival(0.0, LS, Lengths(4, 1))) for _ in range(2))
    with serve_api(folder, [rank]) as api:
        generator = HttpLoadGenerator(
            LoadTarget(url=api.url, model=MODEL, fields={"ignore_eos": True}), 1
        )
        asyncio.run(generator.run([whole], timeout_s=20.0))
        rank.fail_with = "lost", "peer_dead", 503
        asyncio.run(generator.run([lost], timeout_s=20.0))
    assert whole.error == ""
    assert whole.end_s >= whole.tokens_s[0] >= whole.sent_s
    assert lost.error
