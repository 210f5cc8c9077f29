"""What a rank needs to know to start, and what it tells once it is up."""

from __future__ import annotations

import enum

import msgspec

from contracts.config import TandemConfig
from contracts.hardware import Hardware
from contracts.placement import Placement

DRAINED = "nothing is left"  # in the notes of a rank that may be ended


class Group(enum.StrEnum):
    ATTENTION = "attention"
    EXPERT = "expert"
    PREFILL = "prefill"
    PLANNER = "planner"


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, or the planner. `device`: "cpu" or "cuda:N". `backend`: the resolved backend of
    channels.

    `ranks_on_node`: attention ranks and prefill workers that share this device's memory (for the
    size of the KV pool).
    `hardware`: what the planner starts from. `placement`: of the experts on the group's expert
    ranks, or on the prefill workers.
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
    placement: Placement = Placement()

    @property
    def name(self) -> str:
        return rank_name(self.group, self.rank)

    @property
    def own_experts(self) -> dict[int, tuple[int, ...]]:
        """By layer, the experts that `placement` gives this rank."""
        return self.placement.experts_of(self.rank)


def rank_name(group: Group, rank: int) -> str:
    """ "attention-0", "expert-1": the name in errors, metrics and traces."""
    return f"{group.value}-{rank}"


def rank_names(group: Group, ranks: int) -> tuple[str, ...]:
    """By rank number."""
    return tuple(rank_name(group, rank) for rank in range(ranks))


class RankReady(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has loaded its weights and listens. `client_address`: attention ranks and prefill
    workers. `channel_address`: expert ranks', where a prefill worker hands out its experts ("" if
    it does not), and where the planner listens. `experts_address`: where an expert rank hands out
    experts, if they may move. `process_identity`: its process, as actors/channels/local_process.py
    finds it. `metrics_address`: "host:port/path" where it is scraped; "": nowhere."""

    name: str
    pid: int
    channel_address: str
    client_address: str = ""
    experts_address: str = ""
    load_s: float = 0.0
    kv_blocks: int = 0
    process_identity: bytes = b""
    metrics_address: str = ""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` answers at any time.

    sections: numbers, by which part of the rank counts them. Of every rank that computes: stage_s
    (seconds in each stage since the loop started), channel_bytes (sent, received) and totals. Where
    there is a KV pool: kv_blocks, by state. Attention ranks: plans (batches by the plan that they
    ran under) and chosen_by (batches by who chose it). Prefill workers: work, in FLOPs, or in
    tokens where those cannot be counted. Where experts may move: placement (generation; of expert
    ranks also experts that are there, moves by outcome, what they brought).
    notes: planner: "ready", or why its plans are not used; degraded: which peers' experts come from
    elsewhere, and why; placement: that a generation is to come; leaving: what is left to do of a
    rank that is to go, LEFT where that is nothing.
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
