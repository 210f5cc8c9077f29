"""Start parameters of a rank, and its status."""

import enum

import msgspec

from contracts.config import TandemConfig
from contracts.hardware import Hardware
from contracts.placement import Placement

DRAINED = "nothing is left"  # note of a rank that may be stopped


class Group(enum.StrEnum):
    ATTENTION = "attention"
    EXPERT = "expert"
    PREFILL = "prefill"
    PLANNER = "planner"


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of one rank or of the planner.

    device: "cpu" or "cuda:N". backend: the resolved channel backend. ranks_on_node: attention ranks
    and prefill workers that share this device's memory, for the size of the KV pool. core_share:
    number of this rank among its machine's, and their number; 0: unknown. hardware:
    initial values of the planner. placement: of the experts on the group's expert ranks, or on the
    prefill workers.
    """

    group: Group
    rank: int
    attention_ranks: int
    expert_ranks: int
    model_folder: str
    token: bytes
    epoch: int
    device: str
    backend: str
    host: str = "127.0.0.1"
    prefill_ranks: int = 0
    ranks_on_node: int = 1
    core_share: tuple[int, int] = (0, 0)
    is_pinned: bool = False
    config: TandemConfig = TandemConfig()
    hardware: Hardware | None = None
    placement: Placement = Placement()

    @property
    def name(self) -> str:
        return rank_name(self.group, self.rank)

    @property
    def own_experts(self) -> dict[int, tuple[int, ...]]:
        """Return layer → experts of this rank in `placement`."""
        return self.placement.experts_of(self.rank)


def rank_name(group: Group, rank: int) -> str:
    """Return the name in errors, metrics and traces, such as "attention-0"."""
    return f"{group.value}-{rank}"


def rank_names(group: Group, ranks: int) -> tuple[str, ...]:
    return tuple(rank_name(group, rank) for rank in range(ranks))


class RankReady(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and process of a rank that has loaded its weights and listens.

    client_address: of attention ranks and prefill workers. channel_address: of expert ranks, of
    prefill workers that serve their experts (else ""), and of the planner. process_identity: see
    actors/channels/local_process.py. metrics_address: "host:port/path" of its exporter; "" without
    one.
    """

    name: str
    pid: int
    channel_address: str
    client_address: str = ""
    process_identity: bytes = b""
    metrics_address: str = ""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a rank at any time.

    sections: numbers by component. Every rank that computes: stage_s (seconds per stage),
    channel_bytes (sent, received), totals. With a KV pool: kv_blocks by state. Attention ranks:
    plans (batches by plan), chosen_by (batches by source of the plan). Prefill workers: work in
    FLOPs, or in tokens if FLOPs are unknown; shared_batches (led, lost, left). If experts may
    move:
    placement (generation; on expert ranks also experts, moves by outcome, loaded bytes).

    notes: planner: "ready", or why its plans are not used. degraded: peers whose experts are served
    elsewhere, and why. placement: a generation under way. leaving: what is left to drain, DRAINED
    at the end.
    """

    name: str
    healthy: bool
    reason: str = ""
    running: int = 0
    waiting: int = 0
    epoch: int = 0
    uptime_s: float = 0.0
    sections: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
