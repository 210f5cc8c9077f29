"""Recorded stage times. CLOCK_MONOTONIC is shared by all processes of a node, so that timelines
of several ranks lie on one axis."""

from __future__ import annotations

import enum

import msgspec


class Stage(enum.StrEnum):
    """Stages as the metrics name them (`tandem_stage_seconds{stage}`). SEND: a rank cuts and sends
    packets; FINISH: logits and sampling; WAIT: it has nothing to do; HELD: best-effort work is held
    back for a due time; GATHER, HOST_COPY: a layer's experts come from other workers, or from the
    host's memory; SOLVE: a planner answers a rank's question."""

    ATTENTION = "attention"
    SHARED = "shared"
    EXPERT = "expert"
    A2E = "a2e"
    E2A = "e2a"
    SEND = "send"
    FINISH = "finish"
    WAIT = "wait"
    HELD = "held"
    GATHER = "gather"
    HOST_COPY = "host_copy"
    SOLVE = "solve"


TRANSFERS = (Stage.A2E, Stage.E2A)
BUSY = (Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.SEND, Stage.FINISH)


class TaskSpan(msgspec.Struct, frozen=True, array_like=True):
    """One task on one resource, from start_s to end_s (monotonic seconds).

    `resource` is a rank ("attention-0") or a link ("attention-0>expert-1"). of: what an expert rank
    has merged in it: attention ranks, and the numbers of their batches.
    """

    resource: str
    stage: Stage
    start_s: float
    end_s: float
    batch: int = 0
    layer: int = 0
    micro_batch: int = 0
    token_group: int = 0
    tokens: int = 0
    of: tuple[tuple[str, int], ...] = ()
