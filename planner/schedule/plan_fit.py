"""The plan of a batch without a planner, and the fit of a plan to a batch."""

from __future__ import annotations

import msgspec

from contracts.config import ScheduleConfig
from contracts.plan import Order, Plan
from planner.costs.model_shape import Chunks, count_tokens
from planner.schedule.batch_split import sequence_ranges


def default_plan(schedule: ScheduleConfig, tokens: int) -> Plan:
    """Return the configured plan, with r1 and r2 lowered for small batches.

    No micro-batch or token group gets smaller than `min_split_tokens`: each has a fixed cost.
    """
    r1 = max(1, min(schedule.r1, tokens // schedule.min_split_tokens))
    r2 = max(1, min(schedule.r2, tokens // (r1 * schedule.min_split_tokens)))
    if schedule.order is Order.NAIVE:
        return Plan(order=Order.NAIVE)
    return Plan(r1=r1, r2=1 if schedule.order is Order.PPPIPE else r2, order=schedule.order)


MORE_TOKENS = 1.25  # limit of a batch's tokens over the planned ones
UNEVEN = 0.25  # limit of a micro-batch's relative deviation from its planned tokens


def fit_plan(plan: Plan, planned: Chunks, batch: Chunks, *, max_tokens: int) -> Plan | None:
    """Return `plan`, made for the batch `planned`, adapted to `batch`; None if it does not fit.

    The plan's micro-batch sizes remain if they cut this batch alike; otherwise the executor
    balances by attention.
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
