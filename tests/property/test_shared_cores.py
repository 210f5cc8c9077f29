"""Ranks that share a machine's cores: against the replay where they do not, and against the work
that the cores have to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.plan import Order
from planner.schedule.recurrence import makespan_of_layers_ms
from planner.schedule.replay import replay
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule
from planner.schedule.shared_cores import Sharing, shared_makespan_ms
from tests.property.planning import schedules

groups = st.integers(1, 4)


def busy_ms(schedule: Schedule, sharing: Sharing) -> float:
    """Of all ranks, alone."""
    attention = sum(each.attention_ms + each.shared_ms for each in schedule.micro_batches)
    experts = sum(
        run.repeats * run.expert_ms for each in schedule.micro_batches for run in each.groups
    )
    whole = sharing.attention_ranks * attention + sharing.expert_ranks * experts
    return schedule.num_layers * whole


@given(schedules(), groups, groups, st.floats(0, 3))
def test_where_every_rank_has_a_core_it_is_the_replay(
    schedule: Schedule, attention: int, experts: int, more: float
) -> None:
    sharing = Sharing(attention, experts, attention + experts + more)
    found = shared_makespan_ms([schedule] * schedule.num_layers, sharing)
    assert found == pytest.approx(replay(schedule).makespan_ms, rel=1e-6)


@given(schedules(), groups, groups, st.floats(0.5, 8), st.sampled_from([0.0, 0.5, 3.0]))
def test_cores_stay_within_capacity_and_idle_only_without_runnable_work(
    schedule: Schedule, attention: int, experts: int, cores: float, slice_ms: float
) -> None:
    """Between the work of all ranks over the cores, and that and the replay one after the other."""
    sharing = Sharing(attention, experts, cores, slice_ms)
    found = shared_makespan_ms([schedule] * schedule.num_layers, sharing)
    alone, work = replay(schedule).makespan_ms, busy_ms(schedule, sharing) / cores
    tolerance = 1 + 1e-6
    assert max(alone, work) / tolerance <= found <= (alone + work) * tolerance


@given(schedules(), groups, groups, st.floats(0.5, 8))
def test_fair_shares_are_at_worst_the_replay_slowed_down_throughout(
    schedule: Schedule, attention: int, experts: int, cores: float
) -> None:
    sharing = Sharing(attention, experts, cores, slice_ms=0.0)
    found = shared_makespan_ms([schedule] * schedule.num_layers, sharing)
    slowest = max(1.0, (attention + experts) / cores)
    assert found <= replay(schedule).makespan_ms * slowest * (1 + 1e-6)


def test_layers_that_differ_are_taken_as_they_are() -> None:
    def layer(expert_ms: float) -> Schedule:
        one = MicroBatchTimes(1.0, 0.0, (GroupRun(2, 0.1, expert_ms, 0.1),))
        return Schedule((one, one), 2, Order.ASAS, 0, 2)

    layers = [layer(0.2), layer(3.0)]
    found = shared_makespan_ms(layers, Sharing(1, 1, 2.0))
    assert found == pytest.approx(makespan_of_layers_ms(layers))


def test_three_ranks_on_two_cores_by_hand() -> None:
    """Attention 2 ms, then two expert ranks 2 ms; two micro-batches of one layer, links of no
    length. Fair shares: from 2 on the second attention runs beside both expert ranks, each at 2/3,
    until 5. Experts first: it waits until 4. First for 1 ms: it waits until 3, then at 2/3 until
    4.5 when they end, and has one more to do."""
    one = MicroBatchTimes(2.0, 0.0, (GroupRun(1, 0.0, 2.0, 0.0),))
    schedule = Schedule((one, one), 1, Order.ASAS, 0, 2)

    def found(cores: float, slice_ms: float) -> float:
        return shared_makespan_ms([schedule], Sharing(1, 2, cores, slice_ms))

    assert found(2.0, 0.0) == pytest.approx(2 + 3 + 2)
    assert found(1.0, 0.0) == pytest.approx(2 + 6 + 4)
    assert found(2.0, 3.0) == pytest.approx(4 + 2 + 2)
    assert found(2.0, 1.0) == pytest.approx(4.5 + 1 + 2)


def test_times_of_days_come_to_an_end() -> None:
    one = MicroBatchTimes(1e9, 0.0, (GroupRun(3, 1e-7, 1e9 / 3, 1e-7),))
    schedule = Schedule((one,) * 3, 5, Order.ASAS, 0, 3)
    assert shared_makespan_ms([schedule] * 5, Sharing(2, 3, 1.5)) > 1.5e10
