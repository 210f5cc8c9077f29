"""Priority scheduling of a rank, as configured by the section `priority`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from actors.telemetry.telemetry import RankMetrics, growth
from contracts import metrics
from contracts.config import PriorityConfig
from contracts.logs import event
from planner.scheduling.batching import BatchingPolicy
from planner.scheduling.preemption import Preemption, Work
from planner.scheduling.user_policy import UserPolicy, guarded_choice, load_policy, user_batching

log = logging.getLogger("tandem.worker")
W = TypeVar("W", bound=Work)


class Priorities:
    """Priority settings of one rank. Raises ConfigError for an unusable policy."""

    def __init__(self, config: PriorityConfig, telemetry: RankMetrics, rank: str) -> None:
        self.config = config
        self.user = UserPolicy() if config.policy is None else load_policy(config.policy)
        self._telemetry, self._rank = telemetry, rank
        telemetry.count(metrics.POLICY_FALLBACKS, by=0)
        for objective, seconds in (
            ("ls_ttft", config.ls_ttft_s),
            ("ls_tbt", config.ls_tbt_s),
            ("be_wait", config.be_max_wait_s),
        ):
            telemetry.set(metrics.OBJECTIVE, objective, to=seconds)

    def preemption(
        self,
        order: Callable[[Sequence[W]], W],
        choose: Callable[[Sequence[W]], W | None] | None = None,
    ) -> Preemption[W] | None:
        """Return the task selection, or None without preemption. choose: of a user policy."""
        if not self.config.preempt:
            return None
        telemetry = self._telemetry

        def on_blocked(seconds: float) -> None:
            telemetry.observe(metrics.PREEMPTION_BLOCKING, value=seconds)

        def on_resumed(seconds: float) -> None:
            telemetry.observe(metrics.BE_WAIT, value=seconds)

        choice = Preemption(
            order,
            be_share=self.config.be_share,
            choose=None if choose is None else guarded_choice(choose, self._failed),
            on_blocked=on_blocked,
            on_resumed=on_resumed,
        )
        telemetry.read(metrics.PREEMPTIONS, of=growth(lambda: choice.preempted))
        telemetry.read(metrics.BE_HELD, self._rank, of=lambda: choice.held_s)
        return choice

    def batching(self, default: BatchingPolicy) -> BatchingPolicy:
        """Return the user policy's batching, or the default."""
        form = self.user.form
        return default if form is None else user_batching(form, default, self._failed)

    def _failed(self, reason: str) -> None:
        self._telemetry.count(metrics.POLICY_FALLBACKS)
        event(log, "policy_fallback", logging.WARNING, rank=self._rank, reason=reason)
