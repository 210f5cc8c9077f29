"""Measurement of per-layer work of attention and expert ranks, and of per-batch work beside it.

The real executor, scheduler and expert servers are joined by a real channel and stepped in turn by
one thread, so that none takes time from the others. A task's time is the thread's CPU time of the
whole loop step, including channel copies and packet construction: the wall time of an idle core.

On a GPU, all ranks use its current stream, and a task's time is that of its spans: from the first
of its launches to the end of its work on the device, including the filling of packets.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.finisher import Finisher
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence as TokenSequence
from actors.channels.base import PeerJoined
from actors.channels.cuda import with_device_index
from actors.channels.endpoint import Endpoint
from actors.channels.factory import make_endpoint
from actors.channels.handshake import new_token
from actors.channels.ipc import IpcEndpoint, IpcLink
from actors.channels.link import Link, LinkSockets
from actors.engine.executor import Executor, ExecutorParts
from actors.kv.block_manager import BlockManager
from actors.moe.backend import Topology, TopologySource
from actors.moe.expert_server import ExpertServer
from actors.moe.rank_experts import ResidentExperts
from actors.moe.remote_backend import RemoteBackend
from actors.planning.stage_report import expert_calls
from actors.rpc.client_server import event_frames
from actors.telemetry.telemetry import Timeline, spans_of
from contracts.clock import Clock, monotonic_s
from contracts.config import ChannelConfig, ScheduleConfig
from contracts.errors import ChannelError, ResourceError
from contracts.machine import available_bytes
from contracts.messages import Submit
from contracts.placement import Placement
from contracts.plan import Order, Plan
from contracts.ranks import Group, rank_name
from contracts.requests import Priority
from contracts.traces import Stage, TaskSpan
from kernels.device import GpuMemory, runs_on_device, wait_for_device
from kernels.steps import Steps
from models.decoder.attention import KvPool, kv_bytes_per_token
from models.decoder.batch import AttentionBatch, StateRun
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint
from planner.placement.slots import ExpertPlacement, contiguous

BLOCK_TOKENS = 16
_CPU = torch.device("cpu")
_OWN_STAGES = (Stage.ATTENTION, Stage.SEND, Stage.SHARED, Stage.FINISH)


class AttentionTask(NamedTuple):
    """One micro-batch's `stage` (attention or shared expert) in one layer."""

    stage: Stage
    layer: int
    seconds: float
    micro_batch: int = 0


class ProbedPass(NamedTuple):
    """copies: expert ranks per token, mean over layers."""

    attention: list[AttentionTask]
    expert: list[ExpertTask]
    copies: float = 1.0


class StageProbe:
    """Owned by one thread. spec: the checkpoint's, cut to the loaded layers."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        pool_tokens: int,
        expert_ranks: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        """Load the model. Raises ResourceError if it does not fit, and others."""
        self.spec, self._device = first_layers(spec), device
        self._on_device = runs_on_device(device)
        check_memory(self.spec, dtype, pool_tokens, device)
        checkpoint = Checkpoint(folder)
        half = AttentionHalf.load(checkpoint, self.spec, dtype=dtype, device=device)
        in_order = contiguous(
            self.spec.num_experts,
            expert_ranks,
            num_layers=self.spec.num_layers,
            moe_layers=self.spec.moe_layers,
        )
        self._spans: list[TaskSpan] = []
        self._batches = 0
        clock: Clock = monotonic_s
        names = [rank_name(Group.EXPERT, rank) for rank in range(expert_ranks)]
        attention_end, expert_ends = connected_endpoints(names, clock, device)
        self._ends = (attention_end, *expert_ends)
        timeline = _span_timeline(self._spans)
        source = TopologySource(Topology(0, ExpertPlacement(in_order), tuple(names)))
        backend = RemoteBackend(attention_end, source, timeline)
        self._counts = backend.counts
        self._blocks = -(-pool_tokens // BLOCK_TOKENS)
        self._finisher = Finisher(half, max_context_tokens=self.spec.max_context_tokens)
        self._computes_logits = False
        parts = ExecutorParts(
            name=attention_end.name,
            half=half,
            kv=KvPool(
                self.spec, self._blocks, BLOCK_TOKENS, dtype, device, num_states=self._blocks
            ),
            backend=backend,
            sink=self._sink,
            timeline=timeline,
            clock=clock,
        )
        self._executor = Executor(parts, chunk_cost=lambda start, stop: float(stop - start))
        self._experts = ProbedExperts(expert_ends, checkpoint, self.spec, in_order, dtype, device)

    def run(self, chunks: Sequence[tuple[int, int]], *, seed: int) -> ProbedPass:
        """Run one micro-batch of (start, stop) chunks through all layers.

        Cached K and V, and states, are zeros; tokens are random: the router's own routing applies.
        Layers without experts are left out, and so is the first layer with experts (unless it is
        the only one), because it prepares the pass and has no previous result to combine.
        """
        batch = ScheduledBatch(self._batches, Priority.LS, self._sequences(chunks, seed))
        self._batches += 1
        self._executor.submit(batch, Plan(order=Order.ASAS))
        counts = self._counts
        counts.tokens = counts.copies = 0
        times, _ = self._run_to_end()
        counted = self._counted_layers
        # Each expert rank's packet of a device has room for all rows.
        return ProbedPass(
            [task for task in times.attention if task.layer in counted],
            [task for task in times.expert if task.layer in counted],
            len(self._ends) - 1.0 if self._on_device else counts.copies / counts.tokens,
        )

    def serve(self, lengths: Sequence[int], *, micro_batches: int, seed: int) -> float:
        """Return an attention rank's seconds for a batch of prompts, except layers with experts.

        From decoded messages to encoded answers; layers with experts count with their median.
        """
        config = ScheduleConfig(max_batch_tokens=sum(lengths), max_batch_sequences=len(lengths))
        scheduler = Scheduler(config, BlockManager(self._blocks))
        submits = self._submits(lengths, seed)
        self._computes_logits = True
        try:
            start_s = time.thread_time()
            for submit in submits:
                sequence = TokenSequence((0, submit.request_id), submit, BLOCK_TOKENS)
                _ = sequence.hashes
                scheduler.add(sequence)
            batch = scheduler.next_batch()
            assert batch is not None
            self._executor.submit(batch, Plan(order=Order.ASAS, r1=micro_batches))
            spent_s = time.thread_time() - start_s
            times, stepped_s = self._run_to_end()
            start_s = time.thread_time()
            scheduler.complete(batch)
            event_frames([event for _, event in self._finisher.answers])
            spent_s += time.thread_time() - start_s
        finally:
            self._computes_logits = False
            self._finisher.answers = []
        return max(0.0, spent_s + stepped_s - self._layers_s(times))

    def _layers_s(self, times: ProbedPass) -> float:
        """Return the time of all micro-batches' layers; those with experts at their median."""
        moe, counted = set(self.spec.moe_layers), self._counted_layers
        dense_s = sum(task.seconds for task in times.attention if task.layer not in moe)
        by_task: defaultdict[tuple[int, Stage], list[float]] = defaultdict(list)
        for task in times.attention:
            if task.layer in counted:
                by_task[task.micro_batch, task.stage].append(task.seconds)
        return dense_s + sum(len(moe) * statistics.median(each) for each in by_task.values())

    @property
    def _counted_layers(self) -> set[int]:
        moe = self.spec.moe_layers
        return set(moe[1:] if len(moe) > 1 else moe)

    def _run_to_end(self) -> tuple[ProbedPass, float]:
        """Run everything submitted; return the times and the seconds of all attention steps."""
        self._spans.clear()
        times, stepped_s = ProbedPass([], []), 0.0
        with torch.inference_mode():
            while True:
                done, seconds = self._attention_step(times)
                stepped_s += seconds
                if self._executor.failure is not None:
                    raise self._executor.failure
                if done:
                    return self._device_times() if self._on_device else (times, stepped_s)
                times.expert.extend(self._experts.step())

    def _device_times(self) -> tuple[ProbedPass, float]:
        """Return the same by the device, whose work this waits for."""
        wait_for_device(self._device)
        self._executor.step(0.0)  # records the last spans
        seconds: defaultdict[tuple[Stage, int, int], float] = defaultdict(float)
        for span in self._spans:
            if span.stage in _OWN_STAGES:
                stage = Stage.ATTENTION if span.stage is Stage.SEND else span.stage
                seconds[stage, span.layer, span.micro_batch] += span.end_s - span.start_s
        tasks = [
            AttentionTask(stage, layer, each_s, micro_batch)
            for (stage, layer, micro_batch), each_s in seconds.items()
            if stage is not Stage.FINISH
        ]
        return ProbedPass(tasks, self._experts.device_tasks()), sum(seconds.values())

    def _sink(
        self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor
    ) -> Iterable[None]:
        return self._finisher(chunks, batch, hidden_TD) if self._computes_logits else ()

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _attention_step(self, times: ProbedPass) -> tuple[list[ScheduledBatch], float]:
        known, start_s = len(self._spans), time.thread_time()
        done = self._executor.step(0.0)
        seconds = time.thread_time() - start_s
        for span in self._spans[known:]:
            if span.stage in (Stage.ATTENTION, Stage.SHARED):
                times.attention.append(
                    AttentionTask(span.stage, span.layer, seconds, span.micro_batch)
                )
        return done, seconds

    def _sequences(self, chunks: Sequence[tuple[int, int]], seed: int) -> list[Chunk]:
        first, made = 0, list[Chunk]()
        submits = self._submits([stop for _, stop in chunks], seed)
        for (start, stop), submit in zip(chunks, submits, strict=True):
            sequence = TokenSequence((0, submit.request_id), submit, BLOCK_TOKENS)
            blocks = -(-stop // BLOCK_TOKENS)
            sequence.block_table = list(range(first, first + blocks))
            first += blocks
            state = StateRun(len(made), len(made))
            made.append(Chunk(sequence, start, stop, frozenset(), state=state))
        return made

    def _submits(self, lengths: Sequence[int], seed: int) -> list[Submit]:
        generator = torch.Generator().manual_seed(seed)
        return [
            Submit(
                request_id=number,
                token_ids=torch.randint(
                    self.spec.vocab_size, (length,), generator=generator
                ).tolist(),
                sampling=None,
                candidates=[0],
            )
            for number, length in enumerate(lengths)
        ]


def pool_tokens_for(chunks: Sequence[tuple[int, int]]) -> int:
    """Return the pool tokens that a pass of these chunks uses."""
    return sum(-(-stop // BLOCK_TOKENS) * BLOCK_TOKENS for _, stop in chunks)


MOE_LAYERS = 5  # loaded: several, so that weights do not stay in the CPU cache
_ATTENTION = "attention-0"
_MEMORY_FRACTION = 0.8
_JOIN_S = 10.0


def first_layers(spec: ModelSpec) -> ModelSpec:
    """Return `spec` cut after its first MOE_LAYERS layers with experts."""
    moe_layers = spec.moe_layers[:MOE_LAYERS]
    num_layers = moe_layers[-1] + 1
    return msgspec.structs.replace(
        spec,
        num_layers=num_layers,
        moe_layers=moe_layers,
        sliding_windows=spec.sliding_windows[:num_layers],
    )


def check_memory(
    spec: ModelSpec, dtype: torch.dtype, pool_tokens: int, device: torch.device
) -> None:
    """Raise ResourceError if weights and pool exceed the free memory."""
    experts = len(spec.moe_layers) * spec.num_experts * layout.expert_elements(spec)
    weights = layout.attention_half_tensors(spec)
    needed = experts * dtype.itemsize + layout.total_bytes(weights, dtype.itemsize)
    needed += pool_tokens * kv_bytes_per_token(spec, dtype)
    memory = GpuMemory.of(device)
    available = available_bytes() if memory is None else memory.free_bytes()
    if needed > _MEMORY_FRACTION * available:
        raise ResourceError(
            f"model: {spec.num_layers} layers to measure need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are free: profile on a machine with more memory"
        )


class _OneProcessLink(IpcLink):
    """Link on one GPU whose ends are in one process, which cannot open handles of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runtime = SimpleNamespace(
            malloc=self._runtime.malloc,
            free=self._runtime.free,
            ipcGetMemHandle=lambda pointer: pointer.to_bytes(8, "little"),
            ipcOpenMemHandle=lambda handle: int.from_bytes(handle, "little"),
            ipcCloseMemHandle=lambda pointer: None,  # the sender's end owns the memory
        )


class _OneProcessEndpoint(IpcEndpoint):
    def _join(self, link_sockets: LinkSockets) -> Link:
        return _OneProcessLink(link_sockets, self.config, self.clock, self.device, self.streams)


def connected_endpoints(
    experts: Sequence[str], clock: Clock, device: torch.device
) -> tuple[Endpoint, list[Endpoint]]:
    """Return the endpoints of the attention rank and the expert ranks. Raises ChannelError."""
    # A single thread steps all endpoints, so each is silent while another computes.
    config = ChannelConfig(backend="shm", heartbeat_timeout_s=600.0)
    make: Callable[..., Endpoint] = make_endpoint
    if runs_on_device(device):
        make, device = _OneProcessEndpoint, with_device_index(device)
    token = new_token()
    ends = [
        make(name=name, token=token, epoch=1, config=config, clock=clock, device=device)
        for name in (_ATTENTION, *experts)
    ]
    attention_end, *expert_ends = ends
    for end in expert_ends:
        attention_end.connect(end.name, end.listen())
        if not any(isinstance(event_, PeerJoined) for event_ in end.poll(_JOIN_S)):
            raise ChannelError(f"{_ATTENTION} did not join {end.name} within {_JOIN_S} s")
    return attention_end, expert_ends


class ExpertTask(NamedTuple):
    """One token group in one layer: `pairs` (token, expert) pairs on `active` experts."""

    layer: int
    active: int
    pairs: int
    seconds: float


def _span_timeline(spans: list[TaskSpan]) -> Timeline:
    return Timeline(0, lambda recorded: spans.extend(spans_of([recorded])))


class _ProbedRank(NamedTuple):
    """An expert rank. spans: of its server, since they were last read."""

    half: _RecordingHalf
    server: ExpertServer
    spans: list[TaskSpan]

    def tasks(self, seconds: Sequence[float]) -> Iterator[ExpertTask]:
        """Return the recorded calls, which took that long, and forget them."""
        calls, self.half.calls = self.half.calls, []
        for (layer, counts_e), each_s in zip(calls, seconds, strict=True):
            yield ExpertTask(layer, int((counts_e > 0).sum()), int(counts_e.sum()), each_s)


class ProbedExperts:
    """Expert ranks owned by the thread that steps the attention rank."""

    def __init__(
        self,
        ends: Sequence[Endpoint],
        checkpoint: Checkpoint,
        spec: ModelSpec,
        placement: Placement,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Load each rank's experts under `placement`. Raises CheckpointError."""
        self._ranks: list[_ProbedRank] = []
        self._on_device = runs_on_device(device)
        for end, (low, high) in zip(ends, placement.slot_bounds, strict=True):
            spans: list[TaskSpan] = []
            recording_half: Any = _RecordingHalf(
                ExpertHalf.load(checkpoint, spec, range(low, high), dtype=dtype, device=device)
            )
            server = ExpertServer(
                end,
                ResidentExperts(recording_half),
                timeline=_span_timeline(spans),
                device=device,
            )
            self._ranks.append(_ProbedRank(recording_half, server, spans))

    def step(self) -> list[ExpertTask]:
        """Step all ranks in turn; return their tasks with CPU times, none on a device."""
        found: list[ExpertTask] = []
        for rank in self._ranks:
            start_s = time.thread_time()
            rank.server.step(0.0)
            seconds = time.thread_time() - start_s
            if not self._on_device:
                rank.spans.clear()
                found += rank.tasks([seconds] * len(rank.half.calls))
        return found

    def device_tasks(self) -> list[ExpertTask]:
        """Return the tasks since the last call with times of the device, which has ended them."""
        self.step()  # records the last spans
        found: list[ExpertTask] = []
        for rank in self._ranks:
            found += rank.tasks([1e-3 * ms for _, ms in expert_calls(rank.spans)])
            rank.spans.clear()
        return found


class _RecordingHalf:
    """An expert half that records the layer and the pairs of each expert of its calls."""

    def __init__(self, half: ExpertHalf) -> None:
        self._half = half
        self.calls: list[tuple[int, torch.Tensor]] = []

    def steps(
        self,
        layer: int,
        x_UD: torch.Tensor,
        rows_N: torch.Tensor,
        weights_N: torch.Tensor,
        counts_e: torch.Tensor,
    ) -> Steps[torch.Tensor]:
        self.calls.append((layer, counts_e.clone()))
        return self._half.steps(layer, x_UD, rows_N, weights_N, counts_e)

    def device_steps(
        self, layer: int, x_CD: torch.Tensor, pairs_CM: torch.Tensor, counts_e: torch.Tensor
    ) -> Steps[torch.Tensor]:
        self.calls.append((layer, counts_e.clone()))
        return self._half.device_steps(layer, x_CD, pairs_CM, counts_e)
