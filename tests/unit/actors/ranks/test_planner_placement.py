"""Placement over the planner's socket: reports, proposals, rejected peers."""

from __future__ import annotations

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
from contracts.errors import ConfigError
from contracts.placement import Placement
from contracts.planner_messages import (
    CurrentPlacement,
    ModelsChanged,
    MoveOutcome,
    PlacementProposal,
    PlacementReport,
    PlanRequest,
    RoutingSampleReport,
)
from contracts.ranks import Group
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from planner.placement.rebalance_policy import RebalanceStep
from planner.placement.resize import resize_placement
from tests.support.fake_planner import DEADLINE_S, PlannerConnection, real_planner
from tests.support.group_harness import group_config

E, K, TOKENS = 8, 2, 600  # tokens of a report
PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7)]
Checkpoints = Callable[..., Path]


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
        self.attention.send(report(self.layers, seed))

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


def report(layers: int, seed: int = 0, tokens: int = TOKENS) -> RoutingSampleReport:
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


def test_both_expert_ranks_receive_proposal_for_traffic(
    tiny_checkpoint: Checkpoints,
) -> None:
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


def test_no_proposal_until_every_expert_rank_reports_its_experts(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    solves = threading.Semaphore(0)
    whole = planner_placement.PlannerPlacement._on_solved

    def counted(self: planner_placement.PlannerPlacement, result: Any) -> None:
        whole(self, result)
        solves.release()

    monkeypatch.setattr(planner_placement.PlannerPlacement, "_on_solved", counted)
    with group2(tiny_checkpoint) as group:
        group.experts[0].send(held(0, group.placement))
        for seed in range(6):
            group.report(seed)
            assert solves.acquire(timeout=DEADLINE_S)
        assert "tandem_placement_proposals_total 0.0" in group.planner.metrics()
        group.experts[1].send(held(1, group.placement))
        assert group.proposals()[0].generation == 1


def test_failed_move_is_logged_and_its_generation_is_spent(
    tiny_checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with group2(tiny_checkpoint) as group:
        group.hold()
        first = group.proposals()[0]
        group.experts[0].send(
            PlacementReport(
                rank="expert-0", generation=1, outcome=MoveOutcome.FAILED, reason="disk on fire"
            )
        )
        assert group.answers()
        policy = group.planner.loop._placement._policy  # type: ignore[attr-defined]
        assert (first.generation, policy.newest, policy.pending) == (1, 1, None)
    assert "disk on fire" in caplog.text


def broken(layers: int, **fields: Any) -> RoutingSampleReport:
    return msgspec.structs.replace(report(layers, tokens=4), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": b"123"}, "3 bytes of ids"),
        ({"paths": b""}, "0 of paths"),
        ({"paths": b"\xff\x7f" * 8 * 5}, "paths"),
        ({"tokens": 1}, "4 tokens are sampled of 1"),
        ({"ids": b"\xff\xff\xff\x7f" * 8}, "vocabulary"),
    ],
    ids=["ids", "no paths", "experts", "tokens", "vocabulary"],
)
def test_invalid_arrays_end_connection_with_reason(
    tiny_checkpoint: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    message: str,
) -> None:
    with group2(tiny_checkpoint) as group:
        with PlannerConnection(group.address, name="attention-9") as bad:
            assert isinstance(bad.read(), ModelsChanged)
            bad.send(broken(group.layers, **fields))
            with pytest.raises(EOFError):
                bad.read()
        assert group.answers()
    assert "attention-9" in caplog.text
    assert message in caplog.text


def other_slots(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, slots_per_rank=(5, 3))


@pytest.mark.parametrize(
    ("name", "make_message", "error"),
    [
        ("attention-0", lambda placed: held(0, placed), "attention-0 is no expert rank"),
        ("expert-8", lambda placed: held(0, placed), "expert-8 is no expert rank"),
        ("expert-1", lambda placed: held(1, other_slots(placed)), "slots_per_rank=(5, 3)"),
        ("expert-1", lambda placed: held(1, Placement()), "launch the group with a placement"),
        (
            "attention-0",
            lambda _: PlacementReport(
                rank="expert-0", generation=1, outcome=MoveOutcome.FAILED, reason="I say so"
            ),
            "attention-0 is no expert rank",
        ),
    ],
    ids=["attention rank", "no such rank", "other slots", "no placement", "outcome"],
)
def test_foreign_rank_is_refused_in_placement(
    tiny_checkpoint: Checkpoints,
    caplog: pytest.LogCaptureFixture,
    name: str,
    make_message: Callable[[Placement], object],
    error: str,
) -> None:
    with group2(tiny_checkpoint) as group:
        with PlannerConnection(group.address, name=name) as bad:
            assert isinstance(bad.read(), ModelsChanged)
            bad.send(make_message(group.placement))
            with pytest.raises(EOFError):
                bad.read()
        assert group.answers()
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
    tiny_checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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


def test_rebalancing_continues_after_resize(
    tiny_checkpoint: Checkpoints,
) -> None:
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
