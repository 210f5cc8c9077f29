"""What the benchmarks of two classes make of what they see."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.on_rank import per_second_of
from benchmarks.priorities.bound import POLICIES, SLOTS, Machine, PassTimes, at_once, fitted
from cluster.tools.bench.workload import Lengths, RequestArrival, chat_lengths, poisson
from contracts.requests import Priority

TIMES = PassTimes(0.01, 0.001, 0.0005)


def test_tokens_per_second_are_from_one_end_of_a_batch_to_another() -> None:
    batches = [(10.0, 40), (12.0, 100), (14.0, 100), (16.0, 100)]
    done = [(at_s + 0.001 * row, tokens // 4) for at_s, tokens in batches for row in range(4)]
    assert per_second_of(done) == pytest.approx(50.0, rel=0.001), "not 340 tokens in 16 s"
    assert per_second_of(done[:4]) == per_second_of([]) == 0.0, "of one batch nothing is known"


@given(st.integers(0, 10_000), st.floats(0.5, 12.0))
def test_nobody_is_sooner_than_those_that_have_the_machine_at_once(seed: int, rate: float) -> None:
    arrivals = poisson(rate, 6.0, chat_lengths(), 0.3, random.Random(seed))
    soonest = at_once(TIMES, arrivals)
    for policy in POLICIES.values():
        jobs = Machine(TIMES, **policy).play(arrivals)
        assert [job.arrival for job in jobs] == arrivals
        assert all(job.left == 0 for job in jobs), "all that was asked for was generated"
        waits = [job.waits for job in jobs if job.is_ls]
        for (first_s, last_s), best in zip(waits, soonest, strict=True):
            assert first_s >= best.ttft_s - 1e-9
            assert last_s >= best.turnaround_s - 1e-9


def test_run_to_completion_waits_for_all_of_a_batch_and_priority_takes_a_slot_of_best_effort() -> (
    None
):
    long = [RequestArrival(0.0, Priority.BE, Lengths(10, 200))] * SLOTS
    late = RequestArrival(0.5, Priority.LS, Lengths(10, 1))
    firsts_s = {
        name: Machine(TIMES, **policy).play([*long, late])[-1].first_s
        for name, policy in POLICIES.items()
    }
    assert firsts_s["iteration priority"] < 0.7
    assert firsts_s["iteration FCFS"] > 5.0
    assert firsts_s["run to completion"] > 5.0


def test_pass_times_are_fitted_to_what_was_measured() -> None:
    points = {(d, n): TIMES.pass_s(d, n) for d, n in [(0, 16), (0, 256), (1, 0), (8, 0), (32, 0)]}
    assert fitted(points) == pytest.approx(TIMES)
