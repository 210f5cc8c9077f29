"""Tasks that are interrupted at random yields, beside the same work without interruptions."""

import random
import time
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch

import actors.engine.executor
import actors.moe.expert_server
import kernels.attention_ops
import kernels.experts
import kernels.steps
import models.decoder.decoder
import models.experts.expert_half
import tests.support.group_harness as harness
from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.observer import Observer
from actors.batching.sequence import Sequence as TokenSequence
from actors.engine.executor import Executor, ExecutorParts
from actors.gather.stored_backend import StoredBackend
from actors.ranks.rank import Rank
from actors.telemetry.telemetry import Timeline
from cluster.fleet.model_folder import resolve_model_folder
from contracts.clock import monotonic_s
from contracts.config import BUNDLED
from contracts.messages import Cancel, Submit
from contracts.plan import Plan
from contracts.requests import Priority
from kernels.linear import PackedLinear
from models.decoder.batch import AttentionBatch
from planner.scheduling.task_order import LatencyPass, Preemption, Task, W
from tests.oracle.random_requests import check_random_requests
from tests.support.group_harness import (
    PrefillThreads,
    ThreadGroup,
    greedy,
    group_config,
    loop_of,
    prefill_config,
    until,
)
from tests.support.local_model import LocalModel, resident_store
from tests.support.tiny_models import FAMILIES, UNUSUAL_FAMILIES, VOCABULARY, Checkpoints

BLOCK = 16
PLANS = [Plan(), Plan(r1=2), Plan(r1=3)]


class AtRandom(Preemption[W]):
    """Whatever is ready, begun or not, and now and then nothing: worse than any policy."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(lambda ready: ready[0], be_share=0.0)
        self.chance = chance

    def pick(self, ready: Sequence[W], live: Iterable[LatencyPass], now_s: float) -> W | None:
        return None if self.chance.random() < 0.1 else self.chance.choice(ready)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made at every yield, however short the step before it was."""
    monkeypatch.setattr(actors.engine.executor, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(actors.moe.expert_server, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(actors.engine.executor, "HOLD_S", 0.0)


class Rig:
    """An executor fed by hand. hidden: by sequence, what it made of it."""

    def __init__(
        self, model: LocalModel, choice: Preemption[Task] | None, *, last_rows: bool = False
    ) -> None:
        self.kv = model.new_pool(64)
        timeline = Timeline(0)
        store = resident_store(model.experts[0])
        backend = StoredBackend("here", model.attention, store, timeline)
        parts = ExecutorParts(
            "here", model.attention, self.kv, backend, self._sink, timeline, monotonic_s
        )
        self.executor = Executor(
            parts, chunk_cost=lambda a, b: float(b - a), choice=choice, last_rows_only=last_rows
        )
        self.hidden: dict[int, torch.Tensor] = {}
        self.steps = 0
        self._blocks = 0
        self._batches = 0

    def _sink(
        self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor
    ) -> Iterable[None]:
        for chunk, rows in zip(chunks, batch.sequences, strict=True):
            last = rows.first + rows.count - 1
            self.hidden[chunk.sequence.key[1]] = hidden_TD[last].clone()
        return ()

    def submit(self, prompts: dict[int, list[int]], plan: Plan, priority: Priority) -> None:
        chunks = []
        for number, ids in prompts.items():
            submit = Submit(request_id=number, token_ids=ids, sampling=None, priority=priority)
            sequence = TokenSequence((0, number), submit, BLOCK)
            count = -(-len(ids) // BLOCK)
            sequence.block_table = list(range(self._blocks, self._blocks + count))
            self._blocks += count
            chunks.append(Chunk(sequence, 0, len(ids), frozenset()))
        self.executor.submit(ScheduledBatch(self._batches, priority, chunks), plan)
        self._batches += 1

    def run(self, until: int = 0) -> None:
        end_s = monotonic_s() + 30.0
        with torch.inference_mode():
            while self.executor.in_flight > until:
                self.executor.step(0.01)
                self.steps += 1
                assert monotonic_s() < end_s


def batches_of(chance: random.Random) -> list[tuple[dict[int, list[int]], Plan, Priority]]:
    """Prompts of one token (as a decode) to 60; some batches of one, some of several."""
    batches, number = [], 0
    for _ in range(3):
        prompts = {}
        for _ in range(chance.randint(1, 3)):
            length = chance.choice([1, 1, 7, 33, 60])
            prompts[number] = [chance.randrange(1, 131) for _ in range(length)]
            number += 1
        batches.append((prompts, chance.choice(PLANS), chance.choice(list(Priority))))
    return batches


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL_FAMILIES])
def test_a_batch_that_is_interrupted_at_random_yields_has_equal_bits(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    model = LocalModel.load(tiny_checkpoint(family), dtype="float32")
    for seed in range(6):
        chance = random.Random(seed)
        batches = batches_of(chance)
        alone = Rig(model, None)
        for each in batches:
            alone.submit(*each)
            alone.run()
        mixed = Rig(model, AtRandom(chance))
        for each in batches:
            mixed.submit(*each)
        mixed.run()
        assert mixed.steps > 3 * alone.steps, "it was interrupted"
        for number, hidden_D in alone.hidden.items():
            assert torch.equal(mixed.hidden[number], hidden_D), (seed, number)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of every product with a weight, as they are made."""
    rows: list[int] = []
    product = PackedLinear.__call__

    def counted(self: PackedLinear, x_TK: torch.Tensor) -> torch.Tensor:
        rows.append(x_TK.shape[0])
        return product(self, x_TK)

    monkeypatch.setattr(PackedLinear, "__call__", counted)
    return rows


@pytest.mark.parametrize("last_rows", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL_FAMILIES])
def test_no_product_is_of_more_rows_than_a_tile_has_and_tiles_have_the_bits_of_the_whole(
    tiny_checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    products: list[int],
    family: str,
    last_rows: bool,
) -> None:
    """LS waits equally long for a step of a longer BE batch, or one with a popular expert."""
    model = LocalModel.load(tiny_checkpoint(family), dtype="float32")
    chance = random.Random(3)
    prompts = {n: [chance.randrange(1, 131) for _ in range(50)] for n in range(4)}
    whole = Rig(model, None, last_rows=last_rows)
    whole.submit(prompts, Plan(), Priority.BE)
    whole.run()
    assert max(products) >= 200
    products.clear()
    monkeypatch.setattr(kernels.steps, "TILE_ROWS", 32)
    monkeypatch.setattr(models.decoder.decoder, "LIGHT_ROWS", 32)
    monkeypatch.setattr(models.experts.expert_half, "LIGHT_ROWS", 32)
    monkeypatch.setattr(kernels.experts, "RUN_PAIRS", 32)
    monkeypatch.setattr(kernels.experts, "TILE_PAIRS", 32)
    monkeypatch.setattr(kernels.attention_ops, "_STEP_SCORES", 1)
    cut = Rig(model, None, last_rows=last_rows)
    cut.submit(prompts, Plan(), Priority.BE)
    cut.run()
    assert max(products) == 32
    for number, hidden_D in whole.hidden.items():
        assert torch.equal(cut.hidden[number], hidden_D), number


@pytest.mark.usefixtures("every_step")
def test_a_batch_that_is_dropped_anywhere_leaves_the_others_as_they_are(
    tiny_checkpoint: Checkpoints,
) -> None:
    model = LocalModel.load(tiny_checkpoint("qwen3_moe"), dtype="float32")
    chance = random.Random(5)
    kept, dropped, _ = batches_of(chance)
    alone = Rig(model, None)
    alone.submit(*kept)
    alone.run()
    for steps in range(0, 60, 3):
        rig = Rig(model, AtRandom(chance))
        rig.submit(*kept)
        rig.submit(*dropped)
        with torch.inference_mode():
            for _ in range(steps):
                rig.executor.step(0.0)
        rig.executor.drop(1)
        rig.run()
        for number, hidden_D in alone.hidden.items():
            assert torch.equal(rig.hidden[number], hidden_D), (steps, number)


@pytest.mark.long
@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize(
    ("family", "seed"), [(family, n % 2) for n, family in enumerate([*FAMILIES, *UNUSUAL_FAMILIES])]
)
def test_both_classes_get_the_logits_and_tokens_of_the_single_process_path(
    tiny_checkpoint: Checkpoints, family: str, seed: int
) -> None:
    """A small pool, shared prefixes and cancelled requests; no block is lost."""
    folder = tiny_checkpoint(family)
    local = LocalModel.load(folder, dtype="float32")
    chance = random.Random(f"{family} {seed}")
    config = group_config(
        1 + seed,
        chance.randint(1, 2),
        kv={"pool_tokens": BLOCK * chance.choice([14, 24, 64])},
        schedule={"max_batch_tokens": chance.choice([32, 96])},
    )
    with ThreadGroup(folder, config, backend="shm") as group, group.client() as client:
        submit = partial(_submit, chance, client)
        check_random_requests(chance, client, local, submit, str(seed))
        for rank in group.attention:
            blocks = rank_blocks(rank)
            assert blocks["used"] == 0


def test_on_the_bundled_model_tokens_are_those_of_an_undisturbed_run() -> None:
    """Random arrivals of both classes, a pool that evicts, requests that are cancelled."""
    chance = random.Random(12)
    prompts = [
        [chance.randrange(4, 4000) for _ in range(chance.choice((20, 60, 200)))] for _ in range(12)
    ]
    config = group_config(kv={"pool_tokens": BLOCK * 48}, schedule={"max_batch_tokens": 96})
    with (
        ThreadGroup(resolve_model_folder(BUNDLED), config, backend="shm") as group,
        group.client() as client,
    ):
        alone = [client.generated(client.submit(ids, sampling=greedy(12)))[0] for ids in prompts]
        scheduler, rounds = loop_of(group.attention[0]).scheduler, 0
        while rounds < 2 or (not scheduler.requeued_total and rounds < 20):
            rounds += 1  # on a fast machine a request may end before the next ones come
            sent = []
            for ids in chance.sample(prompts, len(prompts)):
                sent.append((_submit(chance, client, ids, sampling=greedy(12)), ids))
                if chance.random() < 0.5:
                    gone = _submit(chance, client, chance.choice(prompts), sampling=greedy(12))
                    time.sleep(chance.uniform(0.0, 0.02))
                    client.send(Cancel(gone))
            for request, ids in sent:
                assert client.generated(request)[0] == alone[prompts.index(ids)]
        (rank,) = group.attention
        assert scheduler.requeued_total, "nothing was evicted"
        assert rank_blocks(rank)["used"] == 0


def rank_blocks(rank: Rank) -> dict[str, int]:
    blocks = loop_of(rank).scheduler.blocks
    until(lambda: not blocks.counts["used"])
    blocks.check([])
    return blocks.counts


def _submit(
    chance: random.Random, client: harness.RankConnection, ids: list[int], **wanted: object
) -> int:
    return client.submit(ids, priority=chance.choice(list(Priority)), **wanted)  # type: ignore[arg-type]


class Overtaking(Observer):
    """How often LS was formed while BE was under way."""

    def __init__(self, rank: Rank) -> None:
        self._executor = loop_of(rank).executor
        self.times = 0

    def formed(self, batch: ScheduledBatch) -> None:
        live = [each.priority for each in self._executor.live]
        self.times += batch.priority is Priority.LS and Priority.BE in live


@pytest.mark.long
@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("experts", ["resident", "streamed", "gathered", "hybrid"])
@pytest.mark.parametrize("disable_kv_cache", [False, True])
def test_ls_overtakes_be_passes_on_prefill_workers_and_all_logits_are_right(
    tiny_checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    experts: str,
    disable_kv_cache: bool,
) -> None:
    """As often as anything comes: copies cost nothing here, by what the policy is told."""
    monkeypatch.setattr(StoredBackend, "copy_s", 0.0)
    folder, chance = tiny_checkpoint("qwen3_moe"), random.Random(experts)
    local = LocalModel.load(folder, dtype="float32")
    workers = 1 if experts in ("resident", "streamed") else 2
    prefill = {"experts": experts, "disable_kv_cache": disable_kv_cache, "max_batch_tokens": 512}
    with PrefillThreads(folder, prefill_config(prefill=prefill), workers=workers) as group:
        spies = [Overtaking(rank) for rank in group.workers]
        for rank, spy in zip(group.workers, spies, strict=True):
            loop_of(rank)._observers = [*loop_of(rank)._observers, spy]
        with group.client() as client:
            rounds = 0  # on a fast machine LS may come between two passes of a round
            while rounds < 4 or (sum(spy.times for spy in spies) == 0 and rounds < 60):
                rounds += 1
                sequences = [
                    [chance.randrange(1, 131) for _ in range(length)]
                    for length in (*(100, 90, 110, 80, 100) * 3, 20, 5, 30, 11, 9)
                ]
                expected = local.last_logits(sequences)
                ids = []
                for index, sequence in enumerate(sequences):
                    priority = Priority.BE if index < 15 else Priority.LS
                    ids.append(client.submit(sequence, candidates=VOCABULARY, priority=priority))
                    if index >= 15:
                        client.scored(ids[-1])  # the next one comes later
                        ids[-1] = client.submit(sequence, candidates=VOCABULARY, priority=priority)
                found = client.logits(ids)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert sum(spy.times for spy in spies) > 0
        for rank in group.workers:
            assert rank_blocks(rank)["used"] == 0
