"""The schedule of one batch, as FinDEP states it (Section 3.2)."""

from __future__ import annotations

import enum

import msgspec


class Order(enum.StrEnum):
    """In which order an attention rank runs its attention (A) and shared-expert (S) tasks.

    NAIVE and PPPIPE run S before A2E (the shared expert is part of attention, FinDEP Figure 3b);
    ASAS runs A S A S ..., AASS runs all A of a layer first, both after A2E has been issued.
    """

    NAIVE = "naive"
    PPPIPE = "pppipe"
    ASAS = "asas"
    AASS = "aass"

    @property
    def shared_before_dispatch(self) -> bool:
        return self in (Order.NAIVE, Order.PPPIPE)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one batch is cut and ordered.

    ma: samples in a micro-batch of one attention rank. r1: number of micro-batches.
    me: tokens per expert in a token group (an average; None until a planner fills it in).
    r2: token groups that each micro-batch is cut into.
    """

    r1: int = 1
    r2: int = 1
    order: Order = Order.ASAS
    ma: int | None = None
    me: float | None = None

    @property
    def label(self) -> str:
        """ "asas r1=2 r2=1": for tables and logs."""
        samples = "" if self.ma is None else f"ma={self.ma} "
        return f"{self.order.value} {samples}r1={self.r1} r2={self.r2}"

    def __post_init__(self) -> None:
        if self.r1 < 1 or self.r2 < 1 or (self.ma is not None and self.ma < 1):
            raise ValueError(f"r1={self.r1}, r2={self.r2}, ma={self.ma}: each must be at least 1")
        if self.order is Order.NAIVE and (self.r1, self.r2) != (1, 1):
            raise ValueError(f"order naive means r1=1, r2=1, got r1={self.r1}, r2={self.r2}")
        if self.order is Order.PPPIPE and self.r2 != 1:
            raise ValueError(f"order pppipe means r2=1, got r2={self.r2}")
