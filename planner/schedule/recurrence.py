"""Makespan of any schedule in its static order, without its spans.

A layer maps the times at which resources are free to those one layer later by sums and maxima. Once
two layers (or two pairs of layers) differ by one constant in all of these times, all later ones do,
and the rest is a product. A run of equal token groups is computed at once, because equal jobs pass
three servers at the pace of the slowest.
"""

import functools
from collections.abc import Sequence

from contracts.plan import Order
from planner.schedule.schedule import GroupRun, MicroBatchTimes, Schedule
from planner.scheduling.task_order import TaskStage, position, static_order

_SAME = 1e-12  # relative difference of two times that is rounding


class _Free:
    """Times in ms from which attention group, servers and micro-batches are free."""

    __slots__ = ("attention", "returned", "servers")

    def __init__(self, micro_batches: int) -> None:
        self.attention = 0.0
        self.servers = (0.0, 0.0, 0.0)
        self.returned = [0.0] * micro_batches

    def all(self) -> list[float]:
        return [self.attention, *self.servers, *self.returned]


def makespan_ms(schedule: Schedule) -> float:
    """Return the makespan of `replay`, up to rounding."""
    times = [_folded(schedule, micro_batch) for micro_batch in schedule.micro_batches]
    first, following, trailing = _tasks(schedule.order, len(times), schedule.shared_lag)
    trailing_ms = sum(times[index].shared_ms for _, index in trailing)
    free = _Free(len(times))
    _layer(free, first, times)
    states: list[list[float]] = [free.all()]
    for done in range(1, schedule.num_layers):
        _layer(free, following, times)
        states.append(free.all())
        gain_ms = _gain(states, schedule.num_layers - done - 1)
        if gain_ms is not None:
            return _last_end(states[-1], trailing_ms) + gain_ms
    return _last_end(states[-1], trailing_ms)


def makespan_of_layers_ms(layers: Sequence[Schedule]) -> float:
    """Return the makespan of layers with different token groups: a schedule each, of one plan."""
    times = [[_folded(layer, each) for each in layer.micro_batches] for layer in layers]
    first, following, trailing = _tasks(layers[0].order, len(times[0]), layers[0].shared_lag)
    free = _Free(len(times[0]))
    for index, of_layer in enumerate(times):
        _layer(free, following if index else first, of_layer)
    return _last_end(free.all(), sum(times[-1][index].shared_ms for _, index in trailing))


@functools.lru_cache(maxsize=4096)
def _tasks(
    order: Order, micro_batches: int, shared_lag: int
) -> tuple[list[tuple[bool, int]], list[tuple[bool, int]], list[tuple[bool, int]]]:
    """Return tasks (is shared, micro-batch) of the first and each further layer, and after all."""
    parts: tuple[list[tuple[bool, int]], ...] = ([], [], [])
    for task in static_order(order, micro_batches, 2, shared_lag):
        parts[position(task)[0]].append((task.stage is TaskStage.SHARED, task.micro_batch))
    return parts[0], parts[1], parts[2]


def _gain(states: list[list[float]], layers_left: int) -> float | None:
    """Return the time that `layers_left` more layers add, or None if it is not determined yet."""
    for period in (1, 2):
        if len(states) > period and layers_left % period == 0:
            gain_ms = _constant_gain(states[-1 - period], states[-1])
            if gain_ms is not None:
                return layers_left // period * gain_ms
    return None


def _last_end(state: list[float], trailing_ms: float) -> float:
    return max(state[0] + trailing_ms, *state[1:])


def _folded(schedule: Schedule, times: MicroBatchTimes) -> MicroBatchTimes:
    """Return the times with the shared expert as part of attention under NAIVE and PPPIPE."""
    if not schedule.order.shared_before_dispatch:
        return times
    return times._replace(attention_ms=times.attention_ms + times.shared_ms, shared_ms=0.0)


def _layer(free: _Free, tasks: list[tuple[bool, int]], times: list[MicroBatchTimes]) -> None:
    now_ms, servers = free.attention, free.servers
    for is_shared, index in tasks:
        if is_shared:
            now_ms += times[index].shared_ms
            continue
        now_ms = max(now_ms, free.returned[index]) + times[index].attention_ms
        for run in times[index].groups:
            servers = _serve(servers, now_ms, run)
        free.returned[index] = servers[2]
    free.attention, free.servers = now_ms, servers


def _serve(
    servers: tuple[float, float, float], ready_ms: float, run: GroupRun
) -> tuple[float, float, float]:
    """Return when each server is done with `run`, whose groups are ready at `ready_ms`.

    The last end at a server is reached along some path: wait for a server, pass jobs through it and
    the servers behind it. Jobs are equal, so all but one pass at the slowest of these.
    """
    repeats, c1, e, c2 = run
    more = repeats - 1
    first_ms = max(servers[0], ready_ms)
    one_ms = first_ms + c1
    slow_two, slow_three = max(c1, e), max(e, c2)
    return (
        first_ms + repeats * c1,
        max(servers[1] + repeats * e, one_ms + e + more * slow_two),
        max(
            servers[2] + repeats * c2,
            servers[1] + e + c2 + more * slow_three,
            one_ms + e + c2 + more * max(slow_two, c2),
        ),
    )


def _constant_gain(before: list[float], after: list[float]) -> float | None:
    """Return the gain in ms if it is equal for all times, else None."""
    gain_ms = after[0] - before[0]
    tolerance_ms = _SAME * max(after)
    if all(abs(b - a - gain_ms) <= tolerance_ms for a, b in zip(before, after, strict=True)):
        return gain_ms
    return None
