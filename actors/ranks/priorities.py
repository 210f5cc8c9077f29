"""What the section `priority` of the configuration makes of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from actors.telemetry.rank_metrics import RankMetrics, growth
from contracts import metrics
from contracts.config import PriorityConfig
from planner.policies.preemption import Preemption, Work

W = TypeVar("W", bound=Work)


def preemption(
    config: PriorityConfig, order: Callable[[Sequence[W]], W], telemetry: RankMetrics, rank: str
) -> Preemption[W] | None:
    """The choice at every yield, and what it says of itself; None: tasks run to their end."""
    if not config.preempt:
        return None

    def blocked(seconds: float) -> None:
        telemetry.observe(metrics.PREEMPTION_BLOCKING, value=seconds)

    def parked(seconds: float) -> None:
        telemetry.observe(metrics.BE_WAIT, value=seconds)

    choice = Preemption(order, be_share=config.be_share, blocked=blocked, parked=parked)
    telemetry.read(metrics.PREEMPTIONS, of=growth(lambda: choice.preempted))
    telemetry.read(metrics.HELD, rank, of=lambda: choice.held_s)
    return choice
