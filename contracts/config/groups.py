"""Section `groups`."""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.config.section import Count, NonNegative, Seconds, Section


class GroupsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number, placement and lifecycle of ranks.

    Either pipeline may have 0 ranks; the other one then serves its requests as well.
    """

    attention_ranks: NonNegative = 1
    """Ranks of the attention group. attention_ranks and expert_ranks are both at least 1, or
    both 0."""
    expert_ranks: NonNegative = 1
    """Ranks of the expert group. The routed experts of each layer are divided among them."""
    prefill_ranks: NonNegative = 0
    """Workers of the prefill pipeline, which serves classification, scores and completions of one
    token."""
    colocated: Literal["never", "auto"] = "never"
    """Generation in one process per attention rank, which has all weights and sends no packets.
    "auto": prefill workers with resident experts take the place of attention and expert ranks where
    their weights fit half of this machine's free memory, and planner.hardware, if given, predicts
    that it is faster. Each gets the threads of the ranks it replaces."""
    ingress_replicas: Count = 1
    """HTTP server processes. With http.front=direct they share one port, and the kernel distributes
    connections. Limits on connections, memory and keys apply to each replica; schedule.max_waiting
    is divided among them."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of ranks on nodes. "pack": on as few nodes as possible. "spread": the attention
    group and the expert group on different nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the computation. "auto": GPUs if the Ray cluster has them."""
    cpus_per_rank: Annotated[float, Meta(ge=0)] = 0.25
    """CPUs that each rank reserves in Ray. This affects placement and does not limit usage."""
    torch_threads: Count = 1
    """Threads of each rank's computation. Attention and expert ranks of a node compute in turn, so
    each can have all its cores."""
    attention_resources: dict[str, float] = {}
    """Additional Ray resources of each attention rank, by name."""
    expert_resources: dict[str, float] = {}
    """Additional Ray resources of each expert rank, by name."""
    prefill_resources: dict[str, float] = {}
    """Additional Ray resources of each prefill worker, by name."""
    address: str | None = None
    """Address of the Ray cluster. null: RAY_ADDRESS if it is set; otherwise a local cluster is
    started."""
    orphan_timeout_s: Seconds = 60.0
    """Seconds that ranks continue without a launcher. Ray restarts the launcher, which then adopts
    the ranks. Ranks that are not adopted in time exit."""
    ready_timeout_s: Seconds = 180.0
    """Seconds for ranks to be placed, load the model and connect. Requests wait for the same time
    if their pipeline has no rank left."""
    launcher_timeout_s: Seconds = 30.0
    """Seconds without an answer from the launcher after which the server exits with status 3
    (`tandem serve`). Ray needs about ten seconds to restart a launcher on a busy machine."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 20.0
    """Seconds that a rank continues with its requests after a request to stop (`tandem scale`,
    SIGTERM). New requests go to other ranks. Requests that remain at the end continue on other
    ranks from the last generated token."""
    recovery_timeout_s: Seconds = 300.0
    """Seconds that requests wait for the replacement of a lost attention or expert rank. After that
    they fail with the name of the rank, and the server exits with status 3 (`tandem serve`) or is
    restarted (`serve run`). Increase it if a rank takes longer to load."""

    @property
    def ranks(self) -> int:
        """Number of ranks; the planner is not counted."""
        return self.attention_ranks + self.expert_ranks + self.prefill_ranks

    def __post_init__(self) -> None:
        if (self.attention_ranks == 0) != (self.expert_ranks == 0):
            raise ValueError(
                f"attention_ranks={self.attention_ranks} with expert_ranks={self.expert_ranks}: "
                "they work together; give both at least 1, or both 0"
            )
        if self.ranks == 0:
            raise ValueError(
                "no ranks at all: give attention_ranks and expert_ranks, or "
                "prefill_ranks, at least 1"
            )
