"""The executor over a store whose copies are slower than the compute."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.finisher import Finisher
from actors.batching.sequence import Sequence
from actors.engine.executor import Executor, ExecutorParts
from actors.gather.stored_backend import StoredBackend
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.messages import Scored, Submit
from contracts.plan import Plan
from contracts.requests import Priority
from models.decoder.attention import KvPool
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.host_experts import open_host_source
from models.weights.checkpoint import Checkpoint, check_checkpoint
from planner.scheduling.task_order import TaskPolicy, by_layer, by_plan
from tests.support.tiny_models import Checkpoints

BLOCK, LAYERS, DEADLINE_S = 16, 4, 20.0
CPU = torch.device("cpu")


class GatedSource:
    """A checkpoint's experts, copied when the gate opens. `copies`: those started."""

    def __init__(self, folder: Path, layout: ExpertLayout) -> None:
        self._source = open_host_source(folder, layout, store=None, deadline_s=DEADLINE_S)
        self.copies: list[int] = []
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        self.copies.append(layer)
        assert self.gate.acquire(timeout=DEADLINE_S)
        if self.error is not None:
            raise self.error
        self._source.copy(layer, into)

    def close(self) -> None:
        for _ in range(8):
            self.gate.release()
        self._source.close()


class Rig:
    """A worker's executor over a gated or resident store, in float32."""

    def __init__(
        self,
        folder: Path,
        policy: TaskPolicy,
        *,
        deadline_s: float = DEADLINE_S,
        is_resident: bool = False,
    ) -> None:
        spec, checkpoint = check_checkpoint(folder), Checkpoint(folder)
        layout = ExpertLayout(spec, torch.float32, CPU, packed=True)
        every, layers = range(spec.num_experts), None if is_resident else [0]
        held = ExpertHalf.load(checkpoint, spec, every, dtype=torch.float32, layers=layers)
        self.source = GatedSource(folder, layout)
        source = None if is_resident else self.source
        self.store = CopyingStore(source, held.layers(), layout, deadline_s=deadline_s)
        half = AttentionHalf.load(checkpoint, spec, dtype=torch.float32)
        finisher, timeline = Finisher(half, max_context_tokens=64), Timeline(1000)
        self.finisher, pool = finisher, KvPool(spec, 16, BLOCK, torch.float32, CPU)
        backend = StoredBackend("prefill-0", half, self.store, timeline)
        parts = ExecutorParts("prefill-0", half, pool, backend, finisher, timeline, monotonic_s)
        self.executor = Executor(
            parts,
            chunk_cost=lambda a, b: float(b - a),
            policy=policy,
            last_rows_only=not is_resident,
        )

    def submit(self, number: int, priority: Priority = Priority.LS) -> None:
        ids = [(7 * number + step) % 50 for step in range(BLOCK + number)]
        chunk = self.chunk(number, number, ids, len(ids))
        self.executor.submit(ScheduledBatch(number, priority, [chunk]), Plan())

    def chunk(self, number: int, place: int, ids: list[int], stop: int) -> Chunk:
        submit = Submit(request_id=number, token_ids=ids, sampling=None, candidates=[1, 2, 3])
        sequence = Sequence((place, number), submit, BLOCK)
        sequence.block_table = [2 * place, 2 * place + 1]
        return Chunk(sequence, 0, stop, frozenset())

    def run(self, *, steps: int = 10_000) -> list[int]:
        """Numbers of the batches in order of completion."""
        done: list[int] = []
        with torch.inference_mode():
            for _ in range(steps):
                done += [batch.number for batch in self.executor.step(0.01)]
                if not self.executor.live or self.executor.failure is not None:
                    break
        return done

    def answers(self) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for sequence, answer in self.finisher.answers:
            assert isinstance(answer, Scored)
            assert answer.candidate_logits is not None
            found[sequence.key[1]] = answer.candidate_logits
        return found


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS)


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(policy: TaskPolicy = by_layer, **fields: Any) -> Rig:
        rigs.append(Rig(folder, policy, **fields))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.store.close()


def alone(rig: Rig, numbers: list[int]) -> dict[int, list[float]]:
    """Run one batch at a time."""
    for _ in range(50):
        rig.source.gate.release()
    for number in numbers:
        rig.submit(number)
        assert rig.run() == [number]
    return rig.answers()


@pytest.mark.parametrize("policy", [by_layer, by_plan])
def test_concurrent_batches_match_sequential_ones_bit_for_bit(
    opened: Callable[..., Rig], policy: TaskPolicy
) -> None:
    together = opened(policy)
    for _ in range(50):
        together.source.gate.release()
    for number in (0, 1, 2):
        together.submit(number, Priority.BE if number == 1 else Priority.LS)
    assert sorted(together.run()) == [0, 1, 2]
    assert together.answers() == alone(opened(), [0, 1, 2])


def test_concurrent_batches_share_one_copy_of_each_layer(opened: Callable[..., Rig]) -> None:
    rig = opened()
    rig.submit(0)
    rig.submit(1)
    passed = LAYERS - 1
    for _ in range(passed):
        rig.source.gate.release()
    assert sorted(rig.run()) == [0, 1], "as many copies as one of them needs"


@pytest.mark.parametrize("hangs", [False, True])
def test_store_failure_ends_worker_and_is_named(opened: Callable[..., Rig], hangs: bool) -> None:
    rig = opened(deadline_s=0.3 if hangs else DEADLINE_S)
    rig.submit(0)
    if not hangs:
        rig.source.error = ChannelError("prefill-1 is gone")
        rig.source.gate.release()
    assert rig.run() == []
    failure = str(rig.executor.failure)
    assert ("layer 1 did not arrive within 0.3 s" if hangs else "prefill-1 is gone") in failure
    assert [batch.number for batch in rig.executor.fail_all()] == [0]
    assert not rig.executor.live


def test_single_tokens_of_prompts_are_decoded_like_others(opened: Callable[..., Rig]) -> None:
    rig = opened(is_resident=True)
    for number, prompts in enumerate(([[5, 6], [7]], [[7]])):  # the longer one is not complete
        chunks = [rig.chunk(number, place, ids, 1) for place, ids in enumerate(prompts)]
        rig.executor.submit(ScheduledBatch(number, Priority.LS, chunks), Plan())
        assert rig.run() == [number]
    (_, beside), (_, lone) = rig.finisher.answers
    assert isinstance(beside, Scored)
    assert isinstance(lone, Scored)
    assert beside.candidate_logits == lone.candidate_logits
