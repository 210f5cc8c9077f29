"""Frames between ranks and the planner, and the source of a batch's plan.

A connection opens with the mutual challenge of actors/channels/handshake.py. Then each side sends
frames (contracts/messages.py), each a msgpack map tagged by `type`. The planner is not on the path
of requests: without an answer a rank uses its default plan.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from contracts.placement import Placement
from contracts.plan import Plan

PLANNER_PURPOSE = "planner"  # purpose of a connection in its handshake
MAX_PLANNER_FRAME_BYTES = 8 << 20
TRIAL_REPORTS = 4  # batches of a trial, whose times are compared

Position = Annotated[int, Meta(ge=0, le=1 << 40)]
Ms = Annotated[float, Meta(ge=0, le=1e9)]
PositiveMs = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Rows = Annotated[int, Meta(ge=1, le=1 << 40)]
NewTokens = tuple[Position, Position]  # [start, stop) of a sequence; those before are cached
Batch = Annotated[list[NewTokens], Meta(min_length=1, max_length=65_536)]


class PlanSource(enum.StrEnum):
    """Values of `tandem_plan_batches_total{chosen_by}`."""

    PLANNER = "planner"
    PINNED = "pinned"
    DEFAULT = "default"


class NoPlanReason(enum.StrEnum):
    """Reasons why a batch has no plan of the planner (`tandem_plan_batches_total{reason}`)."""

    OFF = "off"  # no planner
    JOINING = "joining"  # the first connection is being made
    LOST = "lost"  # no connection
    SLOW = "slow"  # no answer within planner.answer_timeout_s
    COLD = "cold"  # too few measurements, or none of batches of this size
    NEW_SHAPE = "new_shape"  # first request; the answer serves the next batch of this shape
    MISFIT = "misfit"  # the plan does not fit the batch


class PlanRequest(msgspec.Struct, frozen=True, tag="query"):
    """Request for the plan of a batch like `batch`. `number` is repeated in the answer."""

    number: int
    batch: Batch


class PlanResponse(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Answer to a `PlanRequest`; without a plan, `reason` explains why.

    solve_ms: planning time, 0 if cached. version: of the stage models used. trial: runs
    TRIAL_REPORTS batches of this shape instead, which are reported.
    """

    number: int
    version: int
    plan: Plan | None = None
    trial: Plan | None = None
    solve_ms: Ms = 0.0
    reason: str = ""


class ModelsChanged(msgspec.Struct, frozen=True, tag="models_changed"):
    """Notice that answers of older versions are outdated. Also sent on connecting."""

    version: int


class MicroBatchReport(msgspec.Struct, frozen=True, array_like=True):
    """Times of one layer of a micro-batch, medians over the layers with experts.

    attention_ms includes send_ms, the sending of packets; shared_ms is 0 without shared experts.
    finish_ms: of its sequences after all layers, once (logits, sampling).
    """

    batch: Batch
    attention_ms: PositiveMs
    shared_ms: Ms = 0.0
    finish_ms: Ms = 0.0
    send_ms: Ms = 0.0


class RowsTime(msgspec.Struct, frozen=True, array_like=True):
    """Distinct token rows, and ms of an expert call or of a transfer."""

    rows: Rows
    ms: PositiveMs


class BatchReport(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """A batch that an attention rank has run.

    measured_ms: from its first task to its last. between_ms: the remaining time since the end of
    the previous batch if they share sequences; otherwise 0.
    """

    rank: str
    plan: Plan
    measured_ms: PositiveMs
    micro_batches: Annotated[list[MicroBatchReport], Meta(min_length=1, max_length=4096)]
    e2a: Annotated[list[RowsTime], Meta(max_length=4096)] = []
    between_ms: Ms = 0.0
    solve_ms: Ms = 0.0
    by_planner: bool = False


class ExpertReport(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Recent calls of an expert rank by rows; a call may merge several packets."""

    rank: str
    experts: Annotated[list[RowsTime], Meta(max_length=4096)]
    a2e: Annotated[list[RowsTime], Meta(max_length=4096)] = []


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True, tag="traffic"):
    """Work of an attention rank since its last report, `seconds` ago.

    decode_tokens: rows of one new token; positions: sum of their positions. prompts: pieces of
    prompts; prompt_tokens: their new tokens; starts: sum of the tokens before them. pool_tokens:
    capacity of its KV pool.
    """

    rank: str
    seconds: Annotated[float, Meta(gt=0, le=1e9)]
    pool_tokens: Count
    decode_tokens: Count = 0
    positions: Count = 0
    prompts: Count = 0
    prompt_tokens: Count = 0
    starts: Count = 0


class RoutingSampleReport(msgspec.Struct, frozen=True, kw_only=True, tag="routing"):
    """Recent routing of an attention rank's tokens. Arrays are little-endian bytes.

    ids: int32 [P, 2], token ids of a sample and of their predecessors (-1: none). paths: int16 [P,
    moe layers, K], their experts. tokens: all tokens of the rank since its last report.
    """

    rank: str
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    ids: Annotated[bytes, Meta(max_length=MAX_PLANNER_FRAME_BYTES)]
    paths: Annotated[bytes, Meta(max_length=MAX_PLANNER_FRAME_BYTES)]


class CurrentPlacement(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """First message of an expert rank on every connection to the planner.

    placement: the one in use. newest: the largest generation ever received, including rejected and
    failed ones. A new planner learns from it where experts are and which generations are used; it
    proposes nothing until every expert rank has sent it.
    """

    rank: str
    placement: Placement
    newest: Annotated[int, Meta(ge=0, le=1 << 40)]


class PlacementProposal(msgspec.Struct, frozen=True, tag="proposal"):
    """Request to every expert rank: prepare this placement and notify the attention ranks."""

    placement: Placement


class MoveOutcome(enum.StrEnum):
    """Result of a proposal on one expert rank."""

    READY = "ready"  # all of its experts are loaded
    RETIRED = "retired"  # no rank uses an older placement; its memory is freed
    FAILED = "failed"  # preparation failed; loaded experts are freed


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """Result of a proposal. loaded_bytes, seconds: size and duration of the loading."""

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
