"""Where routed experts are computed: a *plane*. The executor knows no other kind of expert.

    begin ──> (the plane computes, or fetches, or waits) ──> is_complete ──> steps

`RemoteBackend`: on expert ranks, over A2E and E2A. `StoredBackend`: here, with weights from an
expert store. `LockstepBackend`: on all workers at once, the DP+EP baseline.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.requests import Priority
from contracts.traces import Stage
from kernels.steps import Steps
from models.experts.router import RoutedTokens


class TaskKey(NamedTuple):
    """Whose experts: those of a layer of one micro-batch. decodes: it is new tokens only, one of
    each sequence."""

    batch: int
    layer: int
    micro_batch: int
    priority: Priority
    decodes: bool = False

    @property
    def owner(self) -> tuple[int, int]:
        """Whose, at all layers."""
        return self.batch, self.micro_batch


class PendingExperts(Protocol):
    """What `begin` has begun."""

    @property
    def is_complete(self) -> bool:
        """Whether `steps` have nothing to wait for."""


P = TypeVar("P", bound=PendingExperts)


class ExpertBackend(Protocol[P]):
    """Owned by the executor's thread, but for `wake`. After an error of kind `fatal` it computes
    nothing any more; any other ends the batches in flight."""

    @property
    def fatal(self) -> type[ChannelError]: ...

    @property
    def stage(self) -> Stage | None:
        """What the time of `steps` is noted as; None: as part of the attention that follows."""

    @property
    def yields(self) -> bool:
        """Whether others may run between the steps of a task that uses it."""

    @property
    def interleaves(self) -> bool:
        """Whether tasks of one batch may run between those of another."""

    @property
    def copy_s(self) -> float:
        """Seconds in which a layer's weights come, as measured; 0: they are where they are used."""

    @property
    def is_engaged(self) -> bool:
        """Whether it takes part in the computation of others, so that no batch may begin."""

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """A micro-batch of those tokens is about to run; key.layer: its first. Raises
        ChannelError."""

    def dispatch(self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan) -> P:
        """At most one at a time of each micro-batch. hidden_TD: the residual that the experts'
        output is to be added to. Raises ChannelError."""

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        """Takes what has arrived, or waits for it; idle: not because a batch in flight needs it.
        Returns whether something came. Raises ChannelError."""

    def combine(self, hidden_TD: Tensor, pending: P, shared_TD: Tensor | None) -> Steps[None]:
        """Adds what the experts gave, and the shared expert, to the residual, in place. What
        `pending` held is released at their end. Raises ChannelError."""

    def drop(self, pending: P) -> None:
        """Its batch has failed, or gives way; before the end of its `steps`, if they have begun."""

    def wake(self) -> None:
        """Ends a `poll` that waits. Called from any thread."""
