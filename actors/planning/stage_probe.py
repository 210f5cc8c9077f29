"""Measures what attention ranks and expert ranks do per layer: the real executor and the real
expert server, joined by a real channel, stepped in turn in one thread, so that neither takes time
from the other.

A task's time is that of the loop's whole step: it holds what a rank is busy with, copying into
the channel and cutting packets too, not only the products of matrices. It is the thread's CPU time:
what the wall clock would show on a core that nobody else uses.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence as TokenSequence
from actors.channels.base import Endpoint, PeerJoined
from actors.channels.factory import make_endpoint
from actors.channels.handshake import new_token
from actors.engine.executor import Executor, ExecutorParts
from actors.experts.expert_server import ExpertServer
from actors.experts.rank_experts import AllThere
from actors.experts.remote_plane import RemotePlane
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, ResourceError
from contracts.events import Stage, TaskSpan
from contracts.machine import available_bytes
from contracts.messages import Submit
from contracts.plan import Order, Plan
from contracts.requests import Priority
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool, kv_bytes_per_token
from models.experts.moe import ExpertHalf
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint
from models.weights.loading import total_bytes
from planner.placement.contiguous import contiguous
from planner.placement.slots import ExpertPlacement

BLOCK_TOKENS = 16
MOE_LAYERS = 5  # that are loaded: several, so that weights do not stay in the cache
_ATTENTION, _EXPERT = "attention-0", "expert-0"
_MEMORY_FRACTION = 0.8
_JOIN_S = 10.0


class AttentionTask(NamedTuple):
    """`stage` (attention or shared expert) of one micro-batch in one layer."""

    stage: Stage
    layer: int
    seconds: float


class ExpertTask(NamedTuple):
    """One token group in one layer: `pairs` (token, expert) pairs over `active` experts."""

    layer: int
    active: int
    pairs: int
    seconds: float


class PassTimes(NamedTuple):
    attention: list[AttentionTask]
    expert: list[ExpertTask]


class StageProbe:
    """Owned by one thread. `spec` is the checkpoint's, cut to the layers that are loaded."""

    def __init__(
        self, folder: Path, spec: ModelSpec, dtype: torch.dtype, *, pool_tokens: int
    ) -> None:
        """Raises ResourceError if the weights and the pool do not fit; CheckpointError."""
        self.spec = first_layers(spec)
        _check_memory(self.spec, dtype, pool_tokens)
        checkpoint = Checkpoint(folder)
        half = AttentionHalf.load(checkpoint, self.spec, dtype=dtype)
        everyone = range(self.spec.num_experts)
        experts = _Watched(ExpertHalf.load(checkpoint, self.spec, everyone, dtype=dtype))
        self._experts = experts
        self._spans: list[TaskSpan] = []
        self._batches = 0
        everything = contiguous(
            self.spec.num_experts,
            1,
            num_layers=self.spec.num_layers,
            moe_layers=self.spec.moe_layers,
        )
        clock: Clock = monotonic_s
        attention_end, expert_end = _joined(clock)
        self._ends = (attention_end, expert_end)
        timeline = Timeline(0, self._spans.append)
        placement = ExpertPlacement(everything)
        parts = ExecutorParts(
            name=attention_end.name,
            half=half,
            kv=KvPool(self.spec, -(-pool_tokens // BLOCK_TOKENS), BLOCK_TOKENS, dtype),
            plane=RemotePlane(attention_end, placement, [_EXPERT], timeline, clock),
            sink=_forget,
            timeline=timeline,
            clock=clock,
        )
        self._executor = Executor(parts, chunk_cost=lambda start, stop: float(stop - start))
        watched: Any = experts  # has all of an ExpertHalf that the server uses
        self._server = ExpertServer(
            expert_end, AllThere(watched), timeline=Timeline(0), clock=clock
        )

    def run(self, chunks: Sequence[tuple[int, int]], *, seed: int) -> PassTimes:
        """One pass of one micro-batch of (start, stop) chunks through all layers. What is cached is
        zeros; tokens are random, so that routing is the router's own.

        Left out: layers without experts, and the first layer that has some, which prepares the pass
        and has nothing to combine (it is kept where it is the only one).
        """
        batch = ScheduledBatch(self._batches, Priority.LS, self._sequences(chunks, seed))
        self._batches += 1
        self._executor.submit(batch, Plan(order=Order.ASAS))
        times = PassTimes([], [])
        with torch.inference_mode():  # as the ranks' loops
            while not self._attention_step(times):
                if self._executor.failure is not None:
                    raise self._executor.failure
                self._expert_step(times)
        moe = self.spec.moe_layers
        counted = set(moe[1:] if len(moe) > 1 else moe)
        return PassTimes(
            [task for task in times.attention if task.layer in counted],
            [task for task in times.expert if task.layer in counted],
        )

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _attention_step(self, times: PassTimes) -> list[ScheduledBatch]:
        self._spans.clear()
        start_s = time.thread_time()
        done = self._executor.step(0.0)
        seconds = time.thread_time() - start_s
        for span in self._spans:
            if span.stage in (Stage.ATTENTION, Stage.SHARED):
                times.attention.append(AttentionTask(span.stage, span.layer, seconds))
        return done

    def _expert_step(self, times: PassTimes) -> None:
        self._experts.calls.clear()
        start_s = time.thread_time()
        self._server.step(0.0)
        seconds = time.thread_time() - start_s
        for layer, active, pairs in self._experts.calls:
            times.expert.append(ExpertTask(layer, active, pairs, seconds))

    def _sequences(self, chunks: Sequence[tuple[int, int]], seed: int) -> list[Chunk]:
        generator = torch.Generator().manual_seed(seed)
        first, made = 0, []
        for number, (start, stop) in enumerate(chunks):
            ids = torch.randint(self.spec.vocab_size, (stop,), generator=generator).tolist()
            submit = Submit(request_id=number, token_ids=ids, sampling=None, candidates=[0])
            sequence = TokenSequence((0, number), submit, BLOCK_TOKENS)
            blocks = -(-stop // BLOCK_TOKENS)
            sequence.block_table = list(range(first, first + blocks))
            first += blocks
            made.append(Chunk(sequence, start, stop, frozenset()))
        return made


@contextmanager
def stage_probe(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, *, pool_tokens: int
) -> Iterator[StageProbe]:
    probe = StageProbe(folder, spec, dtype, pool_tokens=pool_tokens)
    try:
        yield probe
    finally:
        probe.close()


def pool_tokens_for(chunks: Sequence[tuple[int, int]]) -> int:
    """Tokens of pool that a pass of these chunks uses."""
    return sum(-(-stop // BLOCK_TOKENS) * BLOCK_TOKENS for _, stop in chunks)


def first_layers(spec: ModelSpec) -> ModelSpec:
    """`spec` cut after its first MOE_LAYERS layers with experts."""
    moe_layers = spec.moe_layers[:MOE_LAYERS]
    num_layers = moe_layers[-1] + 1
    return msgspec.structs.replace(
        spec,
        num_layers=num_layers,
        moe_layers=moe_layers,
        sliding_windows=spec.sliding_windows[:num_layers],
    )


class _Watched:
    """An expert half that notes (layer, active experts, pairs) of its calls."""

    def __init__(self, half: ExpertHalf) -> None:
        self._half = half
        self.calls: list[tuple[int, int, int]] = []

    def steps(
        self,
        layer: int,
        x_UD: torch.Tensor,
        rows_N: torch.Tensor,
        weights_N: torch.Tensor,
        counts_e: torch.Tensor,
    ) -> Steps[torch.Tensor]:
        self.calls.append((layer, int((counts_e > 0).sum()), rows_N.shape[0]))
        return self._half.steps(layer, x_UD, rows_N, weights_N, counts_e)


def _forget(chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor) -> Iterable[None]:
    """The sink: no logits are wanted."""
    return ()


def _joined(clock: Clock) -> tuple[Endpoint, Endpoint]:
    token = new_token()
    # One thread steps both ends, so that each is silent while the other computes: never hung.
    config = ChannelConfig(backend="shm", silence_s=600.0)
    device = torch.device("cpu")
    ends = [
        make_endpoint(name=name, token=token, epoch=1, config=config, clock=clock, device=device)
        for name in (_ATTENTION, _EXPERT)
    ]
    attention_end, expert_end = ends
    attention_end.connect(_EXPERT, expert_end.listen())
    if not any(isinstance(happening, PeerJoined) for happening in expert_end.poll(_JOIN_S)):
        raise ChannelError(f"{_ATTENTION} did not join {_EXPERT} within {_JOIN_S} s")
    return attention_end, expert_end


def _check_memory(spec: ModelSpec, dtype: torch.dtype, pool_tokens: int) -> None:
    experts = len(spec.moe_layers) * spec.num_experts * layout.expert_elements(spec)
    needed = experts * dtype.itemsize + total_bytes(layout.attention_half_tensors(spec), dtype)
    needed += pool_tokens * kv_bytes_per_token(spec, dtype)
    available = available_bytes()
    if needed > _MEMORY_FRACTION * available:
        raise ResourceError(
            f"model: {spec.num_layers} layers to measure need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are free: profile on a machine with more memory"
        )
