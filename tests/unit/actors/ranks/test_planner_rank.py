"""The planner's socket: responses, strangers, broken frames, model changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.ranks.rank import Rank
from contracts.errors import HandshakeError
from contracts.plan import Order, Plan
from contracts.planner_messages import (
    MAX_PLANNER_FRAME_BYTES,
    BatchReport,
    ExpertReport,
    MicroBatchReport,
    ModelsChanged,
    PlanRequest,
    PlanResponse,
    RowsTime,
)
from tests.support.fake_planner import PlannerConnection, real_planner
from tests.support.group_harness import group_config
from tests.support.simulated_group import hardware

NESTED = b"\xaf\x0f\x00\x00\x82\xa4type\xa5query\xa1x" + b"\x91" * 4000 + b"\xc0"  # FINDINGS A8
Checkpoints = Callable[..., Path]


@pytest.fixture
def planner(tiny_checkpoint: Checkpoints) -> Iterator[Rank]:
    with real_planner(tiny_checkpoint("qwen3_moe"), group_config(), hardware()) as made:
        yield made


@pytest.fixture
def cold_planner(tiny_checkpoint: Checkpoints) -> Iterator[Rank]:
    with real_planner(tiny_checkpoint("qwen3_moe"), group_config(), None) as made:
        yield made


def address_of(planner: Rank) -> str:
    return planner.ready.channel_address


def report(tokens: int, ms: float = 1.0) -> BatchReport:
    return BatchReport(
        rank="attention-0",
        plan=Plan(order=Order.ASAS),
        measured_ms=5 * ms,
        micro_batches=[MicroBatchReport([(0, tokens)], ms)],
        e2a=[RowsTime(tokens, ms / 10)],
    )


def test_request_is_answered_with_plan_and_makespan(planner: Rank) -> None:
    with PlannerConnection(address_of(planner)) as rank:
        answer = rank.answer(PlanRequest(7, [(0, 300), (0, 100)]))
    assert answer.number == 7
    assert answer.plan is not None
    assert answer.predicted_ms > 0
    assert answer.solve_ms > 0


def test_same_shape_is_not_solved_twice(planner: Rank) -> None:
    with PlannerConnection(address_of(planner)) as rank:
        first = rank.answer(PlanRequest(1, [(0, 300)]))
        second = rank.answer(PlanRequest(2, [(0, 301)]))
    assert (second.plan, second.solve_ms) == (first.plan, 0.0)


def test_cold_planner_reports_why_it_has_no_plan(cold_planner: Rank) -> None:
    with PlannerConnection(address_of(cold_planner)) as rank:
        answer = rank.answer(PlanRequest(1, [(0, 300)]))
    assert answer.plan is None
    assert "too few measured times" in answer.reason


def test_all_ranks_receive_models_changed(cold_planner: Rank) -> None:
    address = address_of(cold_planner)
    with PlannerConnection(address) as rank, PlannerConnection(address) as other:
        assert rank.read() == other.read() == ModelsChanged(1)
        for tokens in (8, 16, 32, 64, 128) * 4:
            rank.send(report(tokens, 0.1 * tokens))
            times = [RowsTime(tokens, 0.1 * tokens)]
            rank.send(ExpertReport(rank="expert-0", experts=times, a2e=times))
        assert rank.read() == other.read() == ModelsChanged(2)


def test_stranger_is_refused(planner: Rank) -> None:
    with pytest.raises(HandshakeError, match="wrong token"):
        PlannerConnection(address_of(planner), token=b"another token of 32 bytes.......")


def test_client_of_other_kind_is_rejected(planner: Rank) -> None:
    with pytest.raises(HandshakeError, match="purpose 'requests'"):
        PlannerConnection(address_of(planner), purpose="requests")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x03\x00\x00\x00abc",
        b"\xff\xff\xff\xff",
        (MAX_PLANNER_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x00\x00\x00\x00",
        pytest.param(NESTED, id="nested"),
    ],
)
def test_broken_frame_ends_only_its_connection(planner: Rank, frame: bytes) -> None:
    with (
        PlannerConnection(address_of(planner)) as good,
        PlannerConnection(address_of(planner)) as bad,
    ):
        assert isinstance(bad.read(), ModelsChanged)
        bad.socket.sendall(frame)
        with pytest.raises(EOFError):
            bad.read()
        assert good.answer(PlanRequest(1, [(0, 10)])).plan is not None


@pytest.mark.parametrize(
    "message",
    [
        {"type": "query", "number": 1, "batch": []},
        {"type": "query", "number": 1, "batch": [[-1, 4]]},
        {"type": "query", "number": 1},
        {
            "type": "batch",
            "rank": "attention-0",
            "plan": {},
            "measured_ms": -1,
            "micro_batches": [],
        },
        {"type": "experts", "rank": "expert-0", "experts": [[0, 1.0]]},
        {"type": "unknown"},
    ],
)
def test_invalid_values_end_their_connection(planner: Rank, message: object) -> None:
    with PlannerConnection(address_of(planner)) as bad:
        assert isinstance(bad.read(), ModelsChanged)
        bad.send(message)
        with pytest.raises(EOFError):
            bad.read()


@pytest.mark.parametrize("batch", [[(5, 5)], [(9, 3)], [(0, 1 << 30)]])
def test_unplannable_batch_gets_a_reason(planner: Rank, batch: list[tuple[int, int]]) -> None:
    with PlannerConnection(address_of(planner)) as rank:
        answer = rank.answer(PlanRequest(1, batch))
        assert (answer.plan, bool(answer.reason)) == (None, True)
        assert isinstance(rank.answer(PlanRequest(2, [(0, 9)])), PlanResponse)
