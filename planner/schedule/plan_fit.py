"""The plan of a batch when no planner answers."""

from __future__ import annotations

import msgspec

from contracts.config import ScheduleConfig
from contracts.plan import Order, Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.schedule.batch_split import sequence_ranges


def default_plan(schedule: ScheduleConfig, tokens: int) -> Plan:
    """The configured plan, with r1 and r2 lowered until no micro-batch and no token group of a
    batch of `tokens` is smaller than `min_split_tokens`: each costs a fixed time per layer."""
    r1 = max(1, min(schedule.r1, tokens // schedule.min_split_tokens))
    r2 = max(1, min(schedule.r2, tokens // (r1 * schedule.min_split_tokens)))
    if schedule.order is Order.NAIVE:
        return Plan(order=Order.NAIVE)
    return Plan(r1=r1, r2=1 if schedule.order is Order.PPPIPE else r2, order=schedule.order)


MORE_TOKENS = 1.25  # than planned, at most: activations and packets grow with them
UNEVEN = 0.25  # of its planned tokens: how far a micro-batch may be off


def fit_plan(plan: Plan, planned: Chunks, batch: Chunks, *, max_tokens: int) -> Plan | None:
    """`plan`, made for `planned`, as `batch` should run it; None where it must not.

    Both are new tokens [start, stop) per sequence. The plan's sizes of micro-batches stay where
    they cut this batch as they cut the planned one; otherwise the executor balances by attention.
    """
    tokens, planned_tokens = count_tokens(batch), count_tokens(planned)
    groups = plan.r1 // max(1, len(plan.sequence_chunks))
    if tokens > min(max_tokens, MORE_TOKENS * planned_tokens) or groups > len(batch):
        return None
    longest = max(stop - start for start, stop in batch)
    if longest < len(plan.sequence_chunks) or plan.r2 > tokens:
        return None
    if plan.micro_batch_samples and not _cut_alike(plan, planned, batch):
        return msgspec.structs.replace(plan, micro_batch_samples=(), ma=None)
    return plan


def _cut_alike(plan: Plan, planned: Chunks, batch: Chunks) -> bool:
    if len(planned) != len(batch):
        return False
    ranges = sequence_ranges([1.0] * len(batch), plan)
    pairs = [(count_tokens(planned[a:b]), count_tokens(batch[a:b])) for a, b in ranges]
    return all(abs(now - then) <= UNEVEN * then for then, now in pairs)
