"""Section `schedule`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Count, Section
from contracts.plan import Order, Plan


class ScheduleConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan that is used without a planner, and limits of a batch."""

    order: Order = Order.ASAS
    """Order of attention (A) and shared-expert (S) tasks on an attention rank. naive and pppipe: S
    before dispatch. asas: A S A S. aass: all A of a layer first."""
    r1: Count = 2
    """Micro-batches per batch."""
    r2: Count = 1
    """Token groups per micro-batch; each is dispatched separately. Values above 1 require asas or
    aass."""
    min_split_tokens: Count = 32
    """Minimum tokens of a micro-batch or token group. Smaller batches have fewer
    parts."""
    max_batch_tokens: Count = 4096
    """Maximum tokens of a batch on an attention rank."""
    max_batch_sequences: Count = 256
    """Maximum sequences of a batch on an attention rank."""
    cuda_graphs: bool | None = None
    """CUDA graphs of the attention half of batches in decode, captured when a size is first needed.
    null: where they are possible."""
    max_waiting: Count = 1024
    """Maximum sequences per rank and priority class that wait for a first result. Further requests
    are rejected with 429."""
    request_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Maximum share of a batch and of max_waiting for one client request while others wait. At
    least one of its sequences is always allowed."""

    def __post_init__(self) -> None:
        Plan(r1=self.r1, r2=self.r2, order=self.order)  # raises if they are inconsistent
