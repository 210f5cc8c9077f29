"""What a rank needs to know to start, and what it tells once it is up."""

from __future__ import annotations

import enum

import msgspec

from contracts.config import TandemConfig
from contracts.hardware import Hardware


class Group(enum.StrEnum):
    ATTENTION = "attention"
    EXPERT = "expert"
    PREFILL = "prefill"
    PLANNER = "planner"


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, or the planner. `device`: "cpu" or "cuda:N". `backend`: the resolved backend of
    channels.

    `ranks_on_node`: attention ranks and prefill workers that share this device's memory (for the
    size of the KV pool).
    `hardware`: what the planner starts from.
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
    config: TandemConfig = TandemConfig()
    hardware: Hardware | None = None

    @property
    def name(self) -> str:
        return rank_name(self.group, self.rank)


def rank_name(group: Group, rank: int) -> str:
    """ "attention-0", "expert-1": the name in errors, metrics and traces."""
    return f"{group.value}-{rank}"


class RankReady(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has loaded its weights and listens. `client_address`: attention ranks and prefill
    workers. `channel_address`: expert ranks', where a prefill worker hands out its experts ("" if
    it does not), and where the planner listens. `whereabouts`: its process, as
    actors/channels/neighbour.py finds it."""

    name: str
    pid: int
    channel_address: str
    client_address: str = ""
    load_s: float = 0.0
    kv_blocks: int = 0
    whereabouts: bytes = b""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` answers at any time.

    stage_s: seconds in each stage since the loop started. exposed_s: seconds in which the rank
    waited while a payload for it was under way. batches: how many ran under which plan. planner:
    "ready", or why its plans are not used. chosen: how many batches' plans came from whom.
    computed_tokens: that batches have run; those from the prefix cache are not among them.
    Prefill workers only: computed_flops, and peak_flops_per_s, a large product's rate here (0:
    FLOPs cannot be counted); load and saturation, in FLOPs, or in tokens where those are not
    counted; degraded: which peers' experts come from elsewhere, and why.
    """

    name: str
    healthy: bool
    reason: str = ""
    running: int = 0
    waiting: int = 0
    kv_blocks: dict[str, int] = {}
    stage_s: dict[str, float] = {}
    exposed_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    uptime_s: float = 0.0
    epoch: int = 0
    batches: dict[str, int] = {}
    kv_evictions: int = 0
    requeued: int = 0
    planner: str = ""
    chosen: dict[str, int] = {}
    computed_tokens: int = 0
    computed_flops: int = 0
    peak_flops_per_s: float = 0.0
    load: int = 0
    saturation: int = 0
    degraded: str = ""
