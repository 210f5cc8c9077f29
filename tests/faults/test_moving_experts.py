"""Failures while experts move: the move ends by its deadline, requests continue."""

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.config import ChannelConfig
from contracts.planner_messages import MoveOutcome
from contracts.ranks import RankStatus
from models.spec.model import ModelSpec, read_spec
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.fake_planner import FakePlanner, following
from tests.support.group_harness import (
    DEADLINE_S,
    RankConnection,
    connections,
    experts_in_memory,
    greedy,
    group_config,
    until,
)
from tests.support.local_group import LocalGroup
from tests.support.local_model import LocalModel
from tests.support.placements import another
from tests.support.tiny_models import Checkpoints, prompts

pytestmark = pytest.mark.usefixtures("ranks_are_forked")
EXPERTS = ("expert-0", "expert-1")
FAST, SLOW = 1e9, 3e5  # bytes a second: at once; two seconds
PROMPTS = prompts(5, [20, 31, 9])


@pytest.fixture(scope="session")
def deep(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=12, num_experts=8)


@pytest.fixture(scope="session")
def right(deep: Path) -> list[list[int]]:
    local = LocalModel.load(deep, dtype="float32")
    return [local.greedy(prompt, 8) for prompt in PROMPTS]


def config(bytes_per_s: float, **placement: Any) -> dict[str, Any]:
    return {"placement": {"rebalance": "continuous", "bytes_per_s": bytes_per_s} | placement}


@contextlib.contextmanager
def processes(folder: Path, **sections: Any) -> Iterator[tuple[FakePlanner, LocalGroup]]:
    with (
        LocalGroup(str(folder), group_config(2, 2, **sections)) as group,
        FakePlanner(token=group.token) as planner,
    ):
        for process in group.processes.values():
            process.call("join_planner", planner.address).result(DEADLINE_S)
        planner.wait_held(*EXPERTS)
        yield planner, group


def answers(client: RankConnection) -> list[list[int]]:
    requests = [client.submit(prompt, sampling=greedy(8)) for prompt in PROMPTS]
    return [client.generated(request)[0] for request in requests]


def placed(status: RankStatus) -> tuple[float, float]:
    """Return its generation and number of experts."""
    found = status.sections["placement"]
    return found["generation"], found["experts"]


def own(spec: ModelSpec, generation: int, rank: int) -> int:
    return sum(map(len, another(spec, generation).experts_of(rank).values()))


# --- moves that come to nothing


def test_slow_load_is_aborted_at_deadline(deep: Path, right: list[list[int]]) -> None:
    with following(deep, **config(SLOW / 300, move_timeout_s=0.5)) as (planner, group):
        before = [placed(rank.status()) for rank in group.experts]
        with group.client(0) as first, group.client(1) as second:
            planner.propose(another(read_spec(deep), 1))
            for rank in EXPERTS:
                outcome = planner.outcome(rank, 1)
                assert outcome.outcome is MoveOutcome.FAILED
                assert "placement.move_timeout_s" in outcome.reason or "refused" in outcome.reason
            assert answers(first) == answers(second) == right
        until(lambda: [placed(rank.status()) for rank in group.experts] == before)


def test_proposal_reaching_one_rank_is_aborted(deep: Path, right: list[list[int]]) -> None:
    spec = read_spec(deep)
    with following(deep, **config(FAST, move_timeout_s=5.0)) as (planner, group):
        before = [placed(rank.status()) for rank in group.experts]
        with group.client() as client:
            planner.propose(another(spec, 1), "expert-0")
            outcome = planner.outcome("expert-0", 1)
            assert outcome.outcome is MoveOutcome.FAILED
            assert "no word of expert-1" in outcome.reason
            assert [placed(rank.status()) for rank in group.experts] == before
            planner.propose(another(spec, 2))
            for rank in EXPERTS:
                assert planner.outcome(rank, 2).outcome is MoveOutcome.RETIRED
            assert answers(client) == right


@pytest.mark.parametrize("change", ["model", "ranks", "old", "bytes", "twice", "off"])
def test_unsuitable_proposal_is_rejected_with_reason(
    deep: Path, right: list[list[int]], change: str
) -> None:
    spec = read_spec(deep)
    limit: dict[str, Any] = {"bytes": {"max_move_bytes": 1}, "off": {"rebalance": "off"}}
    bytes_per_s = SLOW if change == "twice" else FAST
    with following(deep, **config(bytes_per_s, **limit.get(change, {}))) as (planner, group):
        proposal, words = (
            another(spec, 2),
            {
                "model": "the model has 8",
                "ranks": "the group 2 ranks",
                "old": "not newer than 2",
                "bytes": "placement.max_move_bytes=1",
                "twice": "generation 2 is under way",
                "off": "placement.rebalance=off",
            },
        )
        if change == "model":
            proposal = msgspec.structs.replace(
                proposal, expert_of_slot=(*proposal.expert_of_slot[:-1], ())
            )
        elif change == "ranks":
            proposal = another(spec, 2, ranks=3)
        elif change in ("old", "twice"):
            planner.propose(proposal)
            if change == "old":
                assert planner.outcome("expert-0", 2).outcome is MoveOutcome.RETIRED
            proposal = another(spec, 1 if change == "old" else 3)
        planner.propose(proposal)
        for rank in EXPERTS:
            outcome = planner.outcome(rank, proposal.generation)
            assert outcome.outcome is MoveOutcome.FAILED
            notified_first = change == "twice" and "has refused generation 3" in outcome.reason
            assert words[change] in outcome.reason or notified_first
        with group.client() as client:
            assert answers(client) == right


def test_changed_checkpoint_fails_moves(deep: Path, right: list[list[int]], tmp_path: Path) -> None:
    folder = shutil.copytree(deep, tmp_path / "model")
    spec = read_spec(folder)
    with following(folder, **config(FAST)) as (planner, group), group.client() as client:
        before = [placed(rank.status()) for rank in group.experts]
        shutil.rmtree(folder)
        planner.propose(another(spec, 2))
        reasons = [planner.outcome(rank, 2).reason for rank in EXPERTS]
        assert any(f"{folder}: no such folder" in reason for reason in reasons)
        shutil.copytree(deep, folder)
        _replace_weights(folder)
        planner.propose(another(spec, 3))
        reasons = [planner.outcome(rank, 3).reason for rank in EXPERTS]
        assert any("the checkpoint was replaced since expert-" in reason for reason in reasons)
        assert [placed(rank.status()) for rank in group.experts] == before
        assert answers(client) == right


def _replace_weights(folder: Path) -> None:
    """Overwrite the weights under the same header."""
    weights = next(folder.glob("*.safetensors"))
    other = bytearray(weights.read_bytes())
    other[-64:] = bytes(64)
    weights.unlink()
    weights.write_bytes(other)


# --- memory


def test_moved_experts_free_their_memory(deep: Path) -> None:
    spec = read_spec(deep)
    with following(deep, **config(FAST)) as (planner, group):
        others = experts_in_memory() - sum(int(placed(r.status())[1]) for r in group.experts)
        assert others >= 0
        for generation in range(1, 5):
            planner.propose(another(spec, generation))
            for rank in EXPERTS:
                assert planner.outcome(rank, generation).outcome is MoveOutcome.RETIRED
            counts = [own(spec, generation, rank) for rank in (0, 1)]
            found = [placed(rank.status()) for rank in group.experts]
            assert found == [(generation, count) for count in counts]
            until(lambda counts=counts: experts_in_memory() - others == sum(counts))  # type: ignore[misc]


# --- the planner


def test_move_completes_without_planner(deep: Path, right: list[list[int]]) -> None:
    with following(deep, **config(SLOW)) as (planner, group), group.client() as client:
        planner.propose(another(read_spec(deep), 1))
        until(lambda: any("placement" in rank.status().notes for rank in group.experts))
        planner.held.clear()
        planner.hang_up()
        until(lambda: all(placed(rank.status())[0] == 1 for rank in group.experts))
        assert answers(client) == right
        planner.wait_held(*EXPERTS)
        assert {held.newest for held in planner.held.values()} == {1}


def test_repeated_proposals_are_rejected_as_pending(deep: Path, right: list[list[int]]) -> None:
    spec = read_spec(deep)
    with following(deep, **config(7 * SLOW)) as (planner, group), group.client() as client:
        for generation in range(1, 30):
            planner.propose(another(spec, generation), EXPERTS[generation % 2])
            planner.propose(another(spec, generation), EXPERTS[1 - generation % 2])
            if generation % 10 == 0:
                assert answers(client) == right
        for generation in range(1, 30):
            ends = {planner.outcome(rank, generation).outcome for rank in EXPERTS}
            assert len(ends) == 1
        generations = {placed(rank.status())[0] for rank in group.experts}
        assert len(generations) == 1
        assert answers(client) == right


# --- ranks


def test_move_continues_after_attention_rank_loss(deep: Path, right: list[list[int]]) -> None:
    with processes(deep, **config(SLOW)) as (planner, group):
        doomed, other = connections(group.client_addresses, group.token)
        running = doomed.submit(PROMPTS[0], sampling=greedy(400))
        doomed.wait_started(running)
        planner.propose(another(read_spec(deep), 1))
        until(lambda: "placement" in group.rank_status("expert-0").notes)
        group.processes["attention-0"].send_signal(signal.SIGKILL)
        assert answers(other) == right
        for rank in EXPERTS:
            assert planner.outcome(rank, 1).outcome is MoveOutcome.RETIRED
        assert answers(other) == right
        doomed.close()
        other.close()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_move_is_aborted_if_source_rank_is_lost(
    deep: Path, right: list[list[int]], fault: signal.Signals
) -> None:
    spec = read_spec(deep)
    channel = {"channel": {"heartbeat_timeout_s": ChannelConfig().heartbeat_timeout_s}}
    with processes(deep, **config(SLOW), **channel) as (planner, group):
        clients = connections(group.client_addresses, group.token)
        before = placed(group.rank_status("expert-0"))
        running = [client.submit(PROMPTS[0], sampling=greedy(40)) for client in clients]
        for client, request in zip(clients, running, strict=True):
            client.wait_started(request)
        planner.propose(another(spec, 1))
        until(lambda: "placement" in group.rank_status("expert-0").notes)
        group.processes["expert-1"].send_signal(fault)
        expected = LocalModel.load(deep, dtype="float32").greedy(PROMPTS[0], 40)
        for client, request in zip(clients, running, strict=True):
            assert client.generated(request)[0] == expected
        outcome = planner.outcome("expert-0", 1)
        assert outcome.outcome is MoveOutcome.FAILED
        every = spec.num_experts * len(spec.moe_layers)
        until(lambda: placed(group.rank_status("expert-0")) == (0, every))
        group.replace("expert-1")
        assert [answers(client) for client in clients] == [right, right]
        until(lambda: placed(group.rank_status("expert-0")) == before)
        for client in clients:
            client.close()


# --- many moves, many kills


class Moves:
    """Rounds of moves under load, each ending with a lost rank."""

    def __init__(self, folder: Path, right: list[list[int]], seed: int) -> None:
        self._folder, self._right, self._random = folder, right, random.Random(seed)
        self._spec = read_spec(folder)

    def round(self, moves: int) -> None:
        with processes(self._folder, **config(17 * SLOW, move_timeout_s=20.0)) as (planner, group):
            clients = connections(group.client_addresses, group.token)
            for generation in range(1, moves + 1):
                submitted = [self._submit_one(client) for client in clients]
                planner.propose(another(self._spec, generation))
                self._check(submitted)
                for number, rank in enumerate(EXPERTS):
                    outcome = planner.outcome(rank, generation)
                    assert outcome.outcome is MoveOutcome.RETIRED, outcome
                    expected = generation, own(self._spec, generation, number)
                    assert placed(group.rank_status(rank)) == expected
            self._kill(planner, group, clients, moves)
            for client in clients:
                client.close()

    def _kill(
        self,
        planner: FakePlanner,
        group: LocalGroup,
        clients: list[RankConnection],
        generation: int,
    ) -> None:
        victim = self._random.choice(["attention-0", "attention-1", *EXPERTS])
        submitted = [self._submit_one(client) for client in clients]
        planner.propose(another(self._spec, generation + 1))
        time.sleep(self._random.random() * 0.05)  # anywhere in the move
        group.processes[victim].send_signal(signal.SIGKILL)
        if victim in EXPERTS:
            (left,) = set(EXPERTS) - {victim}
            planner.outcome(left, generation + 1)
            self._check(submitted)
            group.replace(victim)
            self._check([self._submit_one(client) for client in clients])
            for number, rank in enumerate(EXPERTS):
                counts = {(g, own(self._spec, g, number)) for g in (generation, generation + 1)}
                until(lambda rank=rank, counts=counts: placed(group.rank_status(rank)) in counts)  # type: ignore[misc]
            generations = {placed(group.rank_status(rank))[0] for rank in EXPERTS}
            assert len(generations) == 1
            return
        survivor = 1 - int(victim[-1])
        self._check([submitted[survivor]])
        for rank in EXPERTS:
            assert planner.outcome(rank, generation + 1).outcome is MoveOutcome.RETIRED
        self._check([self._submit_one(clients[survivor])])

    def _submit_one(self, client: RankConnection) -> tuple[RankConnection, list[int]]:
        return client, [client.submit(prompt, sampling=greedy(8)) for prompt in PROMPTS]

    def _check(self, submitted: list[tuple[RankConnection, list[int]]]) -> None:
        for client, requests in submitted:
            assert [client.generated(request)[0] for request in requests] == self._right


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("seed", "rounds", "moves"), [(1, 2, 4), pytest.param(2, 20, 10, marks=pytest.mark.slow)]
)
def test_streams_are_exact_over_moves_and_kills(
    deep: Path, right: list[list[int]], seed: int, rounds: int, moves: int
) -> None:
    many = Moves(deep, right, seed)
    for _ in range(rounds):
        many.round(moves)
