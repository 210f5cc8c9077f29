"""The planner's socket: responses, strangers, broken frames, model changes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from actors.ranks import planner_placement
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import contiguous_placements
from contracts.errors import ConfigError, HandshakeError
from contracts.placement import Placement
from contracts.plan import Order, Plan
from contracts.planner_messages import (
    MAX_PLANNER_FRAME_BYTES,
    BatchReport,
    CurrentPlacement,
    ExpertReport,
    MicroBatchReport,
    ModelsChanged,
    MoveOutcome,
    PlacementProposal,
    PlacementReport,
    PlanRequest,
    PlanResponse,
    RoutingSampleReport,
    RowsTime,
)
from contracts.ranks import Group
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.placement.rebalance_policy import RebalanceStep
from planner.placement.resize import resize_placement
from tests.support.fake_planner import DEADLINE_S, PlannerConnection, real_planner
from tests.support.group_harness import group_config
from tests.support.simulated_group import hardware
from tests.support.tiny_models import Checkpoints

NESTED = b"\xaf\x0f\x00\x00\x82\xa4type\xa5query\xa1x" + b"\x91" * 4000 + b"\xc0"


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


def test_request_is_answered_with_a_plan(planner: Rank) -> None:
    with PlannerConnection(address_of(planner)) as rank:
        answer = rank.answer(PlanRequest(7, [(0, 300), (0, 100)]))
    assert answer.number == 7
    assert answer.plan is not None
    assert answer.solve_ms > 0


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": b"another token of 32 bytes......."}, "wrong token"),
        ({"purpose": "requests"}, "purpose 'requests'"),
    ],
)
def test_stranger_is_refused(planner: Rank, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        PlannerConnection(address_of(planner), **options)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x03\x00\x00\x00abc",
        b"\xff\xff\xff\xff",
        (MAX_PLANNER_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x00\x00\x00\x00",
        pytest.param(NESTED, id="nested"),
        {"type": "query", "number": 1, "batch": []},
        {"type": "query", "number": 1, "batch": [[-1, 4]]},
        {"type": "query", "number": 1},
        {"type": "batch", "rank": "a", "plan": {}, "measured_ms": -1, "micro_batches": []},
        {"type": "experts", "rank": "expert-0", "experts": [[0, 1.0]]},
        {"type": "unknown"},
    ],
)
def test_invalid_frame_ends_only_its_connection(planner: Rank, frame: object) -> None:
    with (
        PlannerConnection(address_of(planner)) as good,
        PlannerConnection(address_of(planner)) as bad,
    ):
        assert isinstance(bad.read(), ModelsChanged)
        if isinstance(frame, bytes):
            bad.socket.sendall(frame)
        else:
            bad.send(frame)
        with pytest.raises(EOFError):
            bad.read()
        assert good.answer(PlanRequest(1, [(0, 10)])).plan is not None


@pytest.mark.parametrize("batch", [[(5, 5)], [(9, 3)], [(0, 1 << 30)]])
def test_unplannable_batch_gets_a_reason(planner: Rank, batch: list[tuple[int, int]]) -> None:
    with PlannerConnection(address_of(planner)) as rank:
        answer = rank.answer(PlanRequest(1, batch))
        assert (answer.plan, bool(answer.reason)) == (None, True)
        assert isinstance(rank.answer(PlanRequest(2, [(0, 9)])), PlanResponse)


E, K, TOKENS = 8, 2, 600  # tokens of a report
PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7)]


class Group2(NamedTuple):
    """A planner with connections of one attention and two expert ranks."""

    planner: Rank
    attention: PlannerConnection
    experts: list[PlannerConnection]
    placement: Placement
    layers: int
    folder: Path

    @property
    def address(self) -> str:
        return self.planner.ready.channel_address

    def report(self, seed: int = 0) -> None:
        self.attention.send(routing_report(self.layers, seed))

    def hold(self, newest: int = 0) -> None:
        for rank, expert in enumerate(self.experts):
            expert.send(held(rank, self.placement, newest))

    def answers(self) -> bool:
        with PlannerConnection(self.address) as rank:
            rank.answer(PlanRequest(1, [(0, 9)]))
        return True

    def proposals(self) -> list[Placement]:
        """Report routing until both expert ranks have a proposal."""
        for expert in self.experts:
            expert.socket.settimeout(DEADLINE_S)
        stop = threading.Event()

        def feed() -> None:
            seed = 0
            while not stop.wait(0.05):
                seed += 1
                self.report(seed)

        feeding = threading.Thread(target=feed)
        feeding.start()
        try:
            return [next_proposal(expert) for expert in self.experts]
        finally:
            stop.set()
            feeding.join()


def next_proposal(expert: PlannerConnection) -> Placement:
    while True:
        message = expert.read()
        if isinstance(message, PlacementProposal):
            return message.placement


def routing_report(layers: int, seed: int = 0, tokens: int = TOKENS) -> RoutingSampleReport:
    random = np.random.default_rng(seed)
    paths = np.array(PAIRS, "<i2")[random.integers(0, 4, (tokens, layers))]
    ids = np.stack([np.arange(tokens) % 50, np.full(tokens, -1)], axis=1).astype("<i4")
    return RoutingSampleReport(
        rank="attention-0", tokens=2 * tokens, ids=ids.tobytes(), paths=paths.tobytes()
    )


def held(rank: int, placement: Placement, newest: int = 0) -> CurrentPlacement:
    return CurrentPlacement(rank=f"expert-{rank}", placement=placement, newest=newest)


@contextlib.contextmanager
def group2(make: Checkpoints, **placement: Any) -> Iterator[Group2]:
    folder = make("qwen3_moe", num_experts=E, num_experts_per_tok=K)
    (folder / "tokenizer.json").write_text("{}")
    spec = read_spec(folder)
    placements = contiguous_placements(str(folder), expert_ranks=2)
    config = group_config(1, 2, placement={"rebalance": "continuous", **placement})
    with (
        real_planner(folder, config, None, expert_ranks=2, placements=placements) as planner,
        contextlib.ExitStack() as stack,
    ):
        address = planner.ready.channel_address
        attention, *experts = (
            stack.enter_context(PlannerConnection(address, name=name))
            for name in ("attention-0", "expert-0", "expert-1")
        )
        layers = len(spec.moe_layers)
        yield Group2(planner, attention, experts, placements[Group.EXPERT], layers, folder)


@pytest.fixture(autouse=True)
def frequent_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.planner")
    monkeypatch.setattr(planner_placement, "POLL_INTERVAL_S", 0.02)


def test_both_expert_ranks_receive_proposal_for_traffic(tiny_checkpoint: Checkpoints) -> None:
    with group2(tiny_checkpoint) as group:
        group.hold(newest=6)
        one, other = group.proposals()
        assert one == other
        assert one.generation == 7
        for experts in (one.experts_of(0), one.experts_of(1)):
            for line in experts.values():
                assert all((expert + 4) % E in line for expert in line)
        text = group.planner.metrics()
    assert "tandem_placement_proposals_total 1.0" in text
    assert "tandem_placement_gain_fraction 0." in text
    assert "tandem_placement_gain_fraction 0.0\n" not in text


def broken(**fields: Any) -> Callable[[Group2], object]:
    return lambda group: msgspec.structs.replace(routing_report(group.layers, tokens=4), **fields)


def holds(rank: int, **fields: Any) -> Callable[[Group2], object]:
    return lambda group: held(rank, msgspec.structs.replace(group.placement, **fields))


@pytest.mark.parametrize(
    ("name", "make_message", "error"),
    [
        ("attention-9", broken(ids=b"123"), "3 bytes of ids"),
        ("attention-9", broken(paths=b""), "0 of paths"),
        ("attention-9", broken(paths=b"\xff\x7f" * 8 * 5), "paths"),
        ("attention-9", broken(tokens=1), "4 tokens are sampled of 1"),
        ("attention-9", broken(ids=b"\xff\xff\xff\x7f" * 8), "vocabulary"),
        ("attention-0", holds(0), "attention-0 is no expert rank"),
        ("expert-8", holds(0), "expert-8 is no expert rank"),
        ("expert-1", holds(1, slots_per_rank=(5, 3)), "slots_per_rank=(5, 3)"),
        ("expert-1", lambda _: held(1, Placement()), "launch the group with a placement"),
        (
            "attention-0",
            lambda _: PlacementReport(
                rank="expert-0", generation=1, outcome=MoveOutcome.FAILED, reason="I say so"
            ),
            "attention-0 is no expert rank",
        ),
    ],
)
def test_invalid_message_ends_connection_with_reason(
    tiny_checkpoint: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    name: str,
    make_message: Callable[[Group2], object],
    error: str,
) -> None:
    with group2(tiny_checkpoint) as group:
        with PlannerConnection(group.address, name=name) as bad:
            assert isinstance(bad.read(), ModelsChanged)
            bad.send(make_message(group))
            with pytest.raises(EOFError):
                bad.read()
        assert group.answers()
    assert name in caplog.text
    assert error in caplog.text


def test_plans_are_answered_during_placement_solving(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> RebalanceStep | None:
        started.set()
        assert go_on.wait(DEADLINE_S)
        return None

    monkeypatch.setattr(planner_placement, "find_rebalance_step", slow)
    with group2(tiny_checkpoint) as group:
        group.hold()
        for seed in range(3):
            group.report(seed)
        assert started.wait(DEADLINE_S)
        assert group.answers()
        go_on.set()


def test_failed_solve_is_logged_and_retried(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed, again, times = threading.Event(), threading.Event(), [0]

    def fails(*_: Any, **__: Any) -> RebalanceStep | None:
        times[0] += 1
        (failed if times[0] == 1 else again).set()
        raise ConfigError("no slots for it")

    monkeypatch.setattr(planner_placement, "find_rebalance_step", fails)
    with group2(tiny_checkpoint) as group:
        group.hold()
        for seed in range(3):
            group.report(seed)
        assert failed.wait(DEADLINE_S)
        assert again.wait(DEADLINE_S)  # POLL_INTERVAL_S of the policy later
        assert group.answers()
    assert "no slots for it" in caplog.text


def test_sampled_routing_is_written_as_profile_at_end(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    with group2(tiny_checkpoint, record=str(folder)) as group:
        for seed in range(3):
            group.report(seed)
        group.attention.answer(PlanRequest(1, [(0, 9)]))  # so they have been taken
        made_of = group.folder
    counts = RoutingCounts.read(folder / "routing.safetensors", made_of, read_spec(made_of))
    assert counts.counted == 3 * TOKENS
    assert [path.name for path in folder.iterdir()] == ["routing.safetensors"]


def test_unwritable_folder_is_logged_only(
    tiny_checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with group2(tiny_checkpoint, record=str(tmp_path / "file" / "folder")) as group:
        group.report()
        assert group.answers()
    assert "routing_record_failed" in caplog.text


def test_rebalancing_continues_after_resize(tiny_checkpoint: Checkpoints) -> None:
    with group2(tiny_checkpoint) as group, contextlib.ExitStack() as stack:
        group.hold()
        third = stack.enter_context(PlannerConnection(group.address, name="expert-2"))
        third.send(held(2, group.placement))  # as it came
        placement = resize_placement(group.placement, 3, generation=4)
        group.experts.append(third)
        for rank, expert in enumerate(group.experts):
            expert.send(held(rank, placement, newest=4))
        proposals = group.proposals()
        while proposals[0].generation < 5:  # proposed before it had heard of that
            proposals = [next_proposal(group.experts[0]), next_proposal(group.experts[1])]
        assert {(each.ranks, each.generation) for each in proposals} == {(3, 5)}
