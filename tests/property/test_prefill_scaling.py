"""Scaling of prefill workers under random and constant loads."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.config import ScalingConfig
from contracts.errors import ConfigError
from contracts.loading import load_config
from planner.scheduling.prefill_scaling import UtilizationScaling

POLL_INTERVAL_S = 0.5


class Simulated:
    """Workers that share a load, in thresholds; starting: steps until a new worker is present."""

    def __init__(self, config: ScalingConfig, least: int, start_polls: int = 4) -> None:
        self.policy = UtilizationScaling(config, least)
        self.workers, self.starting = least, 0
        self.now_s = 0.0
        self.changes: list[tuple[float, int]] = []
        self._start_polls = start_polls

    def run(self, load: float, polls: int) -> int:
        for _ in range(polls):
            self.now_s += POLL_INTERVAL_S
            if self.starting:
                self.starting -= 1
                self.workers += self.starting == 0
                self.policy.step(self.now_s, [load] * self.workers, is_steady=False)
                continue
            utilizations = [load / self.workers] * self.workers
            step = self.policy.step(self.now_s, utilizations, is_steady=True)
            if step:
                self.changes.append((self.now_s, step))
            if step > 0:
                self.starting = self._start_polls
            self.workers -= step < 0
        return self.workers


def scaling(most: int, **settings: float) -> ScalingConfig:
    return ScalingConfig(max_prefill_ranks=most, **settings)  # type: ignore[arg-type]


loads = st.lists(st.tuples(st.floats(0, 12), st.integers(1, 200)), max_size=12)
bounds = st.tuples(st.integers(1, 3), st.integers(0, 4))
utilizations = st.tuples(st.floats(0.05, 0.9), st.floats(0.05, 2.0)).map(
    lambda pair: {"scale_down_utilization": pair[0], "scale_up_utilization": pair[0] + pair[1]}
)


@given(loads, bounds, utilizations)
def test_worker_count_stays_within_bounds(
    course: list[tuple[float, int]], bound: tuple[int, int], limits: dict[str, float]
) -> None:
    least, more = bound
    simulated = Simulated(scaling(least + more, **limits), least)
    for load, polls in course:
        for _ in range(polls):
            simulated.run(load, 1)
            assert least <= simulated.workers + (simulated.starting > 0) <= least + more


@given(st.floats(0, 12), bounds, utilizations)
def test_worker_count_settles_under_constant_load(
    load: float, bound: tuple[int, int], limits: dict[str, float]
) -> None:
    least, more = bound
    simulated = Simulated(scaling(least + more, **limits), least)
    simulated.run(load, 4000)
    assert len({step for _, step in simulated.changes}) <= 1
    settled = list(simulated.changes)
    simulated.run(load, 4000)
    assert simulated.changes == settled


@given(st.floats(0.0, 0.3), bounds, loads)
def test_small_load_always_ends_at_the_minimum(
    load: float, bound: tuple[int, int], course: list[tuple[float, int]]
) -> None:
    least, more = bound
    simulated = Simulated(scaling(least + more), least)
    for before, polls in course:
        simulated.run(before, polls)
    assert simulated.run(load, 4000) == least


@given(loads, st.floats(1, 20), st.floats(1, 100))
def test_mean_adapts_between_two_changes(
    course: list[tuple[float, int]], look_back_period_s: float, downscale_delay_s: float
) -> None:
    delays = {"look_back_period_s": look_back_period_s, "downscale_delay_s": downscale_delay_s}
    simulated = Simulated(scaling(4, **delays), 1)
    for load, polls in course:
        simulated.run(load, polls)
    for (before_s, _), (after_s, step) in itertools.pairwise(simulated.changes):
        assert after_s - before_s >= (downscale_delay_s if step < 0 else look_back_period_s)


def test_burst_shorter_than_the_window_starts_no_worker() -> None:
    simulated = Simulated(scaling(3), 1)
    simulated.run(0.1, 40)
    for _ in range(20):
        simulated.run(3.0, 1)
        simulated.run(0.1, 20)
    assert simulated.changes == []


def test_scaling_is_paused_while_a_worker_is_missing_or_unreported() -> None:
    policy = UtilizationScaling(scaling(3), 1)
    for second in range(100):
        assert policy.step(float(second), [9.0], is_steady=False) == 0
        assert policy.step(float(second), [], is_steady=True) == 0


def test_idle_time_before_a_loss_is_not_counted() -> None:
    policy = UtilizationScaling(scaling(3, look_back_period_s=1, downscale_delay_s=10), 1)
    seen = [policy.step(float(second), [0.0, 0.0], is_steady=second != 9) for second in range(40)]
    assert seen.index(-1) > 9 + 10


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["scaling.scale_up_utilization=0.4", "scaling.scale_down_utilization=0.4"],
            "scale_down_utilization=0.4 is not below scale_up_utilization",
        ),
        ([], "groups.prefill_ranks=0"),
        (["groups.prefill_ranks=3"], "max_prefill_ranks=2 with groups.prefill_ranks=3"),
        (["groups.prefill_ranks=1", "prefill.experts=gathered"], "prefill.experts=gathered"),
    ],
)
def test_invalid_scaling_is_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["scaling.max_prefill_ranks=2", *keys])
