"""The event loop of an attention rank: micro-batches as state machines over a ready set.

    ATTENTION(t) ──A2E──> wait for E2A(t) ──> ATTENTION(t+1) ... ──> FINISH
         └────> SHARED(t) ────────────────────┘

What can run now is the *ready set*; a policy (planner/findep/orders.py) picks from it after every
task. To "preempt" a micro-batch is not to pick it: everything it needs stays where it is. Tasks
never wait: only the loop does, and only when nothing is ready.

Owned by one thread. FinDEP's A2E and E2A tasks are the channels' business; here they are a `commit`
and a packet that arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from actors.batching.scheduled_batch import Chunk, ScheduledBatch, slice_of
from actors.channels.base import (
    Endpoint,
    Kind,
    Packet,
    PeerJoined,
    PeerLost,
    transfer_span,
    transfers,
)
from actors.engine.micro_batch import BatchRun, MicroBatch, cut_batch
from actors.engine.token_dispatcher import TokenDispatcher
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, PeerError, PeerHungError
from contracts.events import Stage, TaskSpan
from contracts.plan import Plan
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.experts.router import Routed
from planner.findep.orders import Policy, TaskStage, by_plan
from planner.findep.placement import ExpertPlacement


class Sink(Protocol):
    """Where finished hidden states go (logits, sampling, answers)."""

    def __call__(self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor) -> None:
        """`hidden_TD`: residual after the last layer, rows as in `batch`, whose sequences are those
        of the chunks, in their order; of each at least the rows whose logits are wanted."""


class ExecutorParts(NamedTuple):
    """What an executor works with."""

    half: AttentionHalf
    kv: KvPool
    endpoint: Endpoint
    placement: ExpertPlacement
    expert_ranks: list[str]  # names, by rank number
    sink: Sink
    timeline: Timeline
    clock: Clock
    reply_s: float = ChannelConfig().reply_s


class Executor:
    """Runs batches. `lost` names the expert rank whose loss made the group unusable, if any."""

    def __init__(
        self,
        parts: ExecutorParts,
        *,
        chunk_cost: Callable[[int, int], float],
        policy: Policy = by_plan,
    ) -> None:
        """`chunk_cost(start, stop)`: relative attention cost of new tokens [start, stop)."""
        self._half = parts.half
        self._kv = parts.kv
        self._endpoint = parts.endpoint
        self._dispatcher = TokenDispatcher(
            parts.endpoint, parts.placement, parts.expert_ranks, parts.clock
        )
        self._expert_ranks = parts.expert_ranks
        self._rank_of = {name: rank for rank, name in enumerate(parts.expert_ranks)}
        self._sink = parts.sink
        self._timeline = parts.timeline
        self._clock = parts.clock
        self._chunk_cost = chunk_cost
        self._policy = policy
        self._reply_s = parts.reply_s
        self._heard_s: dict[str, float] = {}  # when each expert rank's last answer came
        self._runs: dict[int, BatchRun] = {}
        self.lost: PeerLost | None = None

    @property
    def failure(self) -> ChannelError | None:
        return None if self.lost is None else self.lost.error

    @property
    def in_flight(self) -> int:
        return len(self._runs)

    def submit(self, scheduled: ScheduledBatch, plan: Plan) -> None:
        """Cuts the batch into micro-batches as `plan` says; they are ready at once."""
        run = BatchRun(scheduled, plan)
        costs = [self._chunk_cost(chunk.start, chunk.stop) for chunk in scheduled.chunks]
        for index, part in enumerate(cut_batch(scheduled, plan, costs)):
            micro_batch = MicroBatch(run, index, part.chunks, self._inputs(part.chunks))
            micro_batch.after = [run.micro_batches[other] for other in sorted(part.after)]
            if part.previous is not None:
                micro_batch.previous = run.micro_batches[part.previous]
            run.micro_batches.append(micro_batch)
        run.remaining = len(run.micro_batches)
        self._runs[scheduled.number] = run

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Takes what has arrived, runs one ready task if there is one, else waits for messages.

        Returns the batches that this step completed.
        """
        ready = self._ready()
        happenings = self._poll(0.0 if ready else timeout_s)
        if happenings:
            self._take(happenings)
            ready = self._ready()
        if self.lost is not None:
            return []
        if not ready:
            if not happenings:
                self._check_replies()
            return []
        micro_batch = self._pick(ready)
        try:
            self._run_task(micro_batch)
        except PeerError as error:
            self.lost = PeerLost(error.peer, error)
            return []
        run = micro_batch.batch
        if run.remaining:
            return []
        del self._runs[run.scheduled.number]
        return [run.scheduled]

    def _pick(self, ready: list[MicroBatch]) -> MicroBatch:
        if len(ready) == 1:
            return ready[0]
        tasks = [micro_batch.task() for micro_batch in ready]
        return ready[tasks.index(self._policy(tasks))]

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops everything in flight; returns what was dropped."""
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            for micro_batch in run.micro_batches:
                for packet in micro_batch.replies.values():
                    packet.release()
        return [run.scheduled for run in runs]

    def _inputs(self, chunks: Iterable[Chunk]) -> AttentionBatch:
        return AttentionBatch.build(
            list(map(slice_of, chunks)),
            block_tokens=self._kv.block_tokens,
            device=self._kv.device,
        )

    def _ready(self) -> list[MicroBatch]:
        return [
            micro_batch
            for run in self._runs.values()
            for micro_batch in run.micro_batches
            if micro_batch.layer >= 0 and micro_batch.is_ready
        ]

    def _poll(self, timeout_s: float) -> list[Packet | PeerJoined | PeerLost]:
        if timeout_s <= 0.0 or not self._runs:
            return self._endpoint.poll(timeout_s)
        start_s = self._clock()
        happenings = self._endpoint.poll(timeout_s)
        self._span(Stage.WAIT, start_s)
        self._timeline.waited(start_s, self._clock(), transfers(happenings))
        return happenings

    def _take(self, happenings: Iterable[Packet | PeerJoined | PeerLost]) -> None:
        for happening in happenings:
            if isinstance(happening, Packet):
                self._take_packet(happening)
            elif isinstance(happening, PeerLost) and happening.peer in self._rank_of:
                self.lost = self.lost or happening  # the first one is the cause

    def _take_packet(self, packet: Packet) -> None:
        header = packet.header
        run = self._runs.get(header.batch)
        if run is None or header.kind is not Kind.E2A:
            packet.release()  # an answer to a batch that has failed
            return
        micro_batch = run.micro_batches[header.micro_batch]
        micro_batch.replies[header.token_group, self._rank_of[packet.peer]] = packet
        self._heard_s[packet.peer] = packet.arrived_s
        micro_batch.pending -= 1
        self._timeline.add(transfer_span(packet, self._endpoint.name))

    def _check_replies(self) -> None:
        """Gives up an expert rank that lives, but has answered nothing for reply_s."""
        now_s = self._clock()
        for run in self._runs.values():
            for micro_batch in run.micro_batches:
                if not micro_batch.pending or now_s - micro_batch.sent_s < self._reply_s:
                    continue
                for piece in micro_batch.slices:
                    peer = self._expert_ranks[piece.rank]
                    came = (piece.token_group, piece.rank) in micro_batch.replies
                    if not came and now_s - self._heard_s.get(peer, 0.0) >= self._reply_s:
                        self.lost = PeerLost(peer, _unanswered(peer, micro_batch, self._reply_s))
                        return

    def _run_task(self, micro_batch: MicroBatch) -> None:
        start_s = self._clock()
        layer = micro_batch.layer
        if micro_batch.stage is TaskStage.SHARED:
            self._shared(micro_batch)
            self._span(Stage.SHARED, start_s, micro_batch, layer)
        elif micro_batch.stage is TaskStage.FINISH:
            hidden_TD = self._dispatcher.combine(micro_batch)
            self._sink(micro_batch.chunks, micro_batch.inputs, hidden_TD)
            micro_batch.layer = -1
            micro_batch.hidden_TD = None
            micro_batch.batch.remaining -= 1
            self._span(Stage.FINISH, start_s, micro_batch, layer)
        else:
            routed = self._attend(micro_batch)
            self._span(Stage.ATTENTION, start_s, micro_batch, layer)
            if routed is not None:
                sent_s = self._clock()
                self._dispatcher.dispatch(micro_batch, routed)
                self._span(Stage.SEND, sent_s, micro_batch, layer)

    def _attend(self, micro_batch: MicroBatch) -> Routed | None:
        """Runs attention of one layer, and the dense feed-forward of a layer without experts."""
        if micro_batch.hidden_TD is None:
            hidden_TD = self._half.embed(micro_batch.inputs)
        else:
            hidden_TD = self._dispatcher.combine(micro_batch)
        layer = micro_batch.layer
        attended = self._half.attend(layer, hidden_TD, micro_batch.inputs, self._kv)
        micro_batch.hidden_TD = attended.hidden_TD
        micro_batch.attended = layer
        if attended.routed is None:
            self._advance(micro_batch)
        elif self._half.has_shared(layer):
            micro_batch.x_TD = attended.routed.x_TD
            if micro_batch.batch.plan.order.shared_before_dispatch:
                self._shared(micro_batch)
            else:
                micro_batch.stage = TaskStage.SHARED
        else:
            self._advance(micro_batch)
        return attended.routed

    def _shared(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.x_TD is not None
        micro_batch.shared_TD = self._half.shared(micro_batch.layer, micro_batch.x_TD)
        micro_batch.x_TD = None
        self._advance(micro_batch)

    def _advance(self, micro_batch: MicroBatch) -> None:
        """On to the next layer, which runs once the replies of this one are here."""
        micro_batch.layer += 1
        last = micro_batch.layer == self._half.spec.num_layers
        micro_batch.stage = TaskStage.FINISH if last else TaskStage.ATTENTION

    def _span(
        self,
        stage: Stage,
        start_s: float,
        micro_batch: MicroBatch | None = None,
        layer: int = 0,
    ) -> None:
        name, end_s = self._endpoint.name, self._clock()
        if micro_batch is None:
            self._timeline.add(TaskSpan(name, stage, start_s, end_s))
            return
        number = micro_batch.batch.scheduled.number
        tokens = micro_batch.inputs.num_tokens
        self._timeline.add(
            TaskSpan(name, stage, start_s, end_s, number, layer, micro_batch.index, 0, tokens)
        )


def _unanswered(peer: str, micro_batch: MicroBatch, reply_s: float) -> PeerHungError:
    batch, layer = micro_batch.batch.scheduled.number, micro_batch.attended
    return PeerHungError(
        f"{peer} lives, but has answered nothing for {reply_s:g} s (channel.reply_s): "
        f"batch {batch} waits at layer {layer}",
        peer,
    )
