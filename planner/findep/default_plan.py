"""The plan of a batch when no planner answers."""

from __future__ import annotations

from contracts.config import ScheduleConfig
from contracts.plan import Order, Plan


def default_plan(schedule: ScheduleConfig, tokens: int) -> Plan:
    """The configured plan, with r1 and r2 lowered until no micro-batch and no token group of a
    batch of `tokens` is smaller than `min_split_tokens`: each costs a fixed time per layer."""
    r1 = max(1, min(schedule.r1, tokens // schedule.min_split_tokens))
    r2 = max(1, min(schedule.r2, tokens // (r1 * schedule.min_split_tokens)))
    if schedule.order is Order.NAIVE:
        return Plan(order=Order.NAIVE)
    return Plan(r1=r1, r2=1 if schedule.order is Order.PPPIPE else r2, order=schedule.order)
