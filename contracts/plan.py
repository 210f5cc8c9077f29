"""Plan of one batch, as in FinDEP (Section 3.2)."""

import enum
import itertools

import msgspec


class Order(enum.StrEnum):
    """Order of attention (A) and shared-expert (S) tasks on an attention rank.

    NAIVE and PPPIPE run S before A2E (the shared expert is part of attention, FinDEP Figure 3b).
    ASAS runs A S A S ..., AASS runs all A of a layer first; both run S after A2E has been issued.
    """

    NAIVE = "naive"
    PPPIPE = "pppipe"
    ASAS = "asas"
    AASS = "aass"

    @property
    def shared_before_dispatch(self) -> bool:
        return self in (Order.NAIVE, Order.PPPIPE)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split and order of one batch.

    ma: samples in a micro-batch of one attention rank. r1: number of micro-batches. me: mean tokens
    per expert in a token group; None until the planner sets it. r2: token groups per micro-batch.

    Beyond the paper: shared_lag: under ASAS, each shared expert runs that many attention tasks
    later, continuing into the next layer; below r1, because a micro-batch's next attention needs
    it. micro_batch_samples: sizes of the micro-batches if they differ (`ma` is then the largest).
    sequence_chunks: ends of the chunks of every sample, as ascending fractions of its length, the
    last 1.0. Micro-batches are then the chunks of the first ma samples in order, then those of the
    next samples; r1 counts them all.
    """

    r1: int = 1
    r2: int = 1
    order: Order = Order.ASAS
    ma: int | None = None
    me: float | None = None
    shared_lag: int = 0
    micro_batch_samples: tuple[int, ...] = ()
    sequence_chunks: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Return a label for tables and logs, such as "asas r1=2 r2=1"."""
        samples = "" if self.ma is None else f"ma={self.ma} "
        if self.micro_batch_samples:
            samples = f"ma={'+'.join(map(str, self.micro_batch_samples))} "
        parts = [f"{self.order.value} {samples}r1={self.r1} r2={self.r2}"]
        if self.shared_lag:
            parts.append(f"lag={self.shared_lag}")
        if self.sequence_chunks:
            parts.append(f"chunks={len(self.sequence_chunks)}")
        return " ".join(parts)

    @property
    def is_beyond_paper(self) -> bool:
        """True if FinDEP's search space lacks this plan."""
        return bool(self.shared_lag or self.micro_batch_samples or self.sequence_chunks)

    def __post_init__(self) -> None:
        if self.r1 < 1 or self.r2 < 1 or (self.ma is not None and self.ma < 1):
            raise ValueError(f"r1={self.r1}, r2={self.r2}, ma={self.ma}: each must be at least 1")
        if self.order is Order.NAIVE and (self.r1, self.r2) != (1, 1):
            raise ValueError(f"order naive means r1=1, r2=1, got r1={self.r1}, r2={self.r2}")
        if self.order is Order.PPPIPE and self.r2 != 1:
            raise ValueError(f"order pppipe means r2=1, got r2={self.r2}")
        if self.is_beyond_paper:
            self._check_beyond()

    def _check_beyond(self) -> None:
        if self.order.shared_before_dispatch:
            raise ValueError(f"order {self.order.value} takes none of the fields beyond the paper")
        lag_limit = self.r1 if self.order is Order.ASAS else 1
        if not 0 <= self.shared_lag < lag_limit:
            raise ValueError(
                f"shared_lag={self.shared_lag} with order {self.order.value}, r1={self.r1}: "
                "give 0, or with order asas less than r1"
            )
        sizes, ends = self.micro_batch_samples, self.sequence_chunks
        if sizes and (min(sizes) < 1 or self.ma not in (None, max(sizes))):
            raise ValueError(
                f"micro_batch_samples={sizes}, ma={self.ma}: sizes are at least 1, ma the largest"
            )
        if ends and not (
            ends[0] > 0 and ends[-1] == 1 and all(a < b for a, b in itertools.pairwise(ends))
        ):
            raise ValueError(f"sequence_chunks={ends}: give ascending parts of 1, the last 1.0")
        chunks = max(1, len(ends))
        if (sizes and len(sizes) * chunks != self.r1) or self.r1 % chunks:
            raise ValueError(
                f"r1={self.r1} with {len(sizes) or 'any number of'} sizes "
                f"in {chunks} chunks: r1 counts every chunk of every size"
            )
