"""Frames between ranks and the planner, and who chose a batch's plan.

A connection opens with the mutual challenge of actors/channels/handshake.py. Then each side sends
frames (contracts/frames.py), each one msgpack map tagged by `type`. Nothing of it is on a request's
path: a rank that hears nothing uses its default plan.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from contracts.placement import Placement
from contracts.plan import Plan

PLANNER_PURPOSE = "planner"  # what a rank says in the handshake that its connection is for
MAX_PLANNER_FRAME_BYTES = 8 << 20

Position = Annotated[int, Meta(ge=0, le=1 << 40)]
Ms = Annotated[float, Meta(ge=0, le=1e9)]
PositiveMs = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Rows = Annotated[int, Meta(ge=1, le=1 << 40)]
NewTokens = tuple[Position, Position]  # [start, stop) of a sequence; those before are cached
Batch = Annotated[list[NewTokens], Meta(min_length=1, max_length=65_536)]


class PlanSource(enum.StrEnum):
    """`tandem_plan_batches_total{chosen_by}`."""

    PLANNER = "planner"
    PINNED = "pinned"
    DEFAULT = "default"


class NoPlanReason(enum.StrEnum):
    """Why a batch has no plan of the planner (`tandem_plan_batches_total{reason}`)."""

    OFF = "off"  # there is none
    JOINING = "joining"  # the first connection is being made
    LOST = "lost"  # no connection
    SLOW = "slow"  # it owes an answer for longer than planner.answer_timeout_s
    COLD = "cold"  # it has too few measured times yet, or none of batches as large
    NEW_SHAPE = "new_shape"  # not asked before: the answer is for the next batch of this shape
    MISFIT = "misfit"  # what was planned is not what was batched


class PlanRequest(msgspec.Struct, frozen=True, tag="query"):
    """Asks for the plan of a batch like this one. `number` comes back in the answer."""

    number: int
    batch: Batch


class PlanResponse(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """`plan` None: there is none, because of `reason`. predicted_ms: its makespan. solve_ms: how
    long the planner took (0: it knew). version: of the stage models that it is made with."""

    number: int
    version: int
    plan: Plan | None = None
    predicted_ms: Ms = 0.0
    solve_ms: Ms = 0.0
    reason: str = ""


class ModelsChanged(msgspec.Struct, frozen=True, tag="models_changed"):
    """Answers of older versions should be asked for again. Sent on connecting too."""

    version: int


class MicroBatchReport(msgspec.Struct, frozen=True, array_like=True):
    """Times of one layer of a micro-batch, medians over the layers with experts. attention_ms holds
    the sending of packets, which send_ms is; shared_ms is 0 without shared experts. finish_ms: of
    its sequences, once, after all layers (logits, sampling)."""

    batch: Batch
    attention_ms: PositiveMs
    shared_ms: Ms = 0.0
    finish_ms: Ms = 0.0
    send_ms: Ms = 0.0


class RowsTime(msgspec.Struct, frozen=True, array_like=True):
    """Distinct token rows and their ms: in a call of experts, or from sent to seen."""

    rows: Rows
    ms: PositiveMs


class BatchReport(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """A batch that an attention rank has run. measured_ms: from its first task to its last.
    between_ms: the rest of the time since the batch before it ended, if some of that one's
    sequences are in this one; else 0."""

    rank: str
    plan: Plan
    measured_ms: PositiveMs
    micro_batches: Annotated[list[MicroBatchReport], Meta(min_length=1, max_length=4096)]
    e2a: Annotated[list[RowsTime], Meta(max_length=4096)] = []
    between_ms: Ms = 0.0
    solve_ms: Ms = 0.0
    by_planner: bool = False


class ExpertReport(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """What an expert rank has run of late: calls by rows (a call may merge several packets)."""

    rank: str
    experts: Annotated[list[RowsTime], Meta(max_length=4096)]
    a2e: Annotated[list[RowsTime], Meta(max_length=4096)] = []


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True, tag="traffic"):
    """All that an attention rank has run since its last one, `seconds` ago. decode_tokens: rows of
    one new token; positions: where they stand, summed. prompts: pieces of prompts; prompt_tokens:
    their new ones; starts: tokens before them, summed. pool_tokens: that its KV pool holds."""

    rank: str
    seconds: Annotated[float, Meta(gt=0, le=1e9)]
    pool_tokens: Count
    decode_tokens: Count = 0
    positions: Count = 0
    prompts: Count = 0
    prompt_tokens: Count = 0
    starts: Count = 0


class RoutingSampleReport(msgspec.Struct, frozen=True, kw_only=True, tag="routing"):
    """Where an attention rank's tokens went of late. Arrays are little-endian bytes.

    ids: int32 [P, 2], token ids of a sample and those before them (-1: none). paths: int16 [P, moe
    layers, K], their experts. tokens: all that the rank has run since its last report.
    """

    rank: str
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    ids: Annotated[bytes, Meta(max_length=MAX_PLANNER_FRAME_BYTES)]
    paths: Annotated[bytes, Meta(max_length=MAX_PLANNER_FRAME_BYTES)]


class CurrentPlacement(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """An expert rank's first message on every connection to the planner: the placement that is
    complete on it and in use (after a move, the new one), and the largest generation that it was
    ever told of, were it refused or failed. A planner that has just begun knows by it where experts
    are, and which numbers are spent: until every expert rank has said it, nothing is proposed."""

    rank: str
    placement: Placement
    newest: Annotated[int, Meta(ge=0, le=1 << 40)]


class PlacementProposal(msgspec.Struct, frozen=True, tag="proposal"):
    """To every expert rank: make this placement ready, and tell the attention ranks."""

    placement: Placement


class MoveOutcome(enum.StrEnum):
    """What became of a proposal on one expert rank."""

    READY = "ready"  # all of its experts are there
    RETIRED = "retired"  # nobody uses an older one any more: what only they had is freed
    FAILED = "failed"  # it never became ready here; what had come is freed


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """loaded_bytes, seconds: what was brought in, and how long that took."""

    rank: str
    generation: Annotated[int, Meta(ge=0, le=1 << 40)]
    outcome: MoveOutcome
    reason: str = ""
    loaded_bytes: Annotated[int, Meta(ge=0)] = 0
    seconds: Annotated[float, Meta(ge=0)] = 0.0


ToPlanner = (
    PlanRequest
    | BatchReport
    | ExpertReport
    | TrafficReport
    | RoutingSampleReport
    | CurrentPlacement
    | PlacementReport
)
FromPlanner = PlanResponse | ModelsChanged | PlacementProposal
