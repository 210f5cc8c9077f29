"""What attention ranks and prefill workers share: they take sequences from clients, batch them, run
them, answer.

A plain class: Ray (actors/ranks/remote.py) and plain processes (actors/ranks/process.py) are thin
shells around it. Its threads: the loop (everything with tensors), the clients' I/O, and what moves
data for a kind of worker. A kind adds what runs a batch, and what happens around that.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from actors.batching.admission import Admission
from actors.batching.finisher import Finisher
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.batching.sequence_errors import failed, failed_by
from actors.channels.loop_watch import LoopWatch
from actors.kv.block_manager import BlockManager
from actors.ranks.memory import bound_memory, kv_pool_blocks
from actors.telemetry.rank_metrics import RankMetrics
from actors.telemetry.timeline import Timeline
from actors.wire.client_server import ClientServer, FromClient
from contracts.clock import monotonic_s
from contracts.config import ScheduleConfig
from contracts.errors import ChannelError, CheckpointError, NotReadyError, PeerError, TandemError
from contracts.events import TaskSpan
from contracts.logs import event
from contracts.messages import Cancel, Event, Events, RankState, Submit
from contracts.worker import RankReady, RankStatus, WorkerSpec
from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line

log = logging.getLogger("tandem.worker")

IDLE_POLL_S = 0.1
CHECK_AFTER_S = 10.0  # so long after the last request that none is likely to wait for it
NOBODY = -1  # no client has this number


class BatchExecutor(Protocol):
    """What runs batches. `failure`: why it can run none any more, if so."""

    @property
    def failure(self) -> ChannelError | None: ...

    @property
    def in_flight(self) -> int: ...

    def step(self, timeout_s: float) -> list[ScheduledBatch]:
        """Runs one task, or waits for something to do. Returns the batches it completed."""

    def fail_all(self) -> list[ScheduledBatch]:
        """Drops everything in flight; returns what was dropped."""


class ServingWorker:
    """Made with its weights loaded. Then: connect, start; status, spans at any time; stop.

    A kind of worker says how it `_open`s (which makes `_executor`), `_wake`s, `_submit`s a batch
    and `_close`s, and may hook into the rest.
    """

    _executor: BatchExecutor
    _scheduler: Scheduler
    _blocks: BlockManager
    _kv: KvPool
    _channel_address = ""

    def __init__(self, spec: WorkerSpec) -> None:
        started_s = monotonic_s()
        config = spec.config
        torch.set_num_threads(config.groups.torch_threads)
        bound_memory()
        self.spec = spec
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._run, name=f"{spec.name}-loop")
        self._metrics = RankMetrics(spec, monotonic_s)
        self._timeline = Timeline(config.trace.spans, self._observe)
        self._watch = LoopWatch(spec.name, config.channel.stuck_s, monotonic_s)
        self._reason = ""  # why this rank cannot serve; empty: it can
        self._busy_s: float | None = None  # when there was last a request, unless checked since
        self._started_s = 0.0
        self._computed_tokens = 0
        self._half = self._load_half()
        self._make_pool()
        self._metrics.read_blocks(lambda: self._blocks.counts)
        self._sections: dict[str, Callable[[], Mapping[str, float]]] = {
            "stage_s": lambda: self._timeline.stage_seconds,
            "kv_blocks": lambda: self._blocks.counts,
            "totals": self._totals,
        }
        self._notes: dict[str, Callable[[], str]] = {}
        self._finisher = Finisher(self._half, max_context_tokens=self._max_context_tokens)
        self._admission = Admission(
            spec.name,
            self._model.vocab_size,
            self._max_context_tokens,
            self._blocks.num_blocks * self._kv.block_tokens,
            self._schedule.max_waiting,
        )
        self._open()
        self._clients = ClientServer(
            spec.name, token=spec.token, wake=self._wake, watch=self._watch
        )
        self.ready = RankReady(
            name=spec.name,
            pid=os.getpid(),
            channel_address=self._channel_address,
            client_address=self._clients.listen(spec.host, deadline_s=config.channel.deadline_s),
            load_s=monotonic_s() - started_s,
            kv_blocks=self._blocks.num_blocks,
        )

    # ---- what a kind of worker adds

    @property
    def _schedule(self) -> ScheduleConfig:
        """Limits of a batch."""
        return self.spec.config.schedule

    def _make_pool(self) -> None:
        """The KV pool, its books and the scheduler."""
        spec, half = self.spec, self._half
        num_blocks = kv_pool_blocks(
            half.spec, half.dtype, spec.config, half.device, ranks_on_node=spec.ranks_on_node
        )
        kv = spec.config.kv
        self._kv = KvPool(half.spec, num_blocks, kv.block_tokens, half.dtype, half.device)
        self._blocks = BlockManager(
            num_blocks, prefix_cache=kv.prefix_cache, share_partial=kv.share_partial_blocks
        )
        self._scheduler = Scheduler(self._schedule, self._blocks)

    def _open(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        """Ends the executor's waiting. Called from any thread."""
        raise NotImplementedError

    def _close(self) -> None:
        """Ends the threads and links that `_open` began. May be called twice."""
        raise NotImplementedError

    def _submit(self, batch: ScheduledBatch) -> None:
        raise NotImplementedError

    def connect(self, addresses: dict[str, str]) -> None:
        """Joins peers: name -> channel address."""
        raise NotImplementedError

    def _warm_up(self) -> None:
        """First thing in the loop."""

    def _unusable(self) -> CheckpointError:
        """What a rank ends with whose own first pass gave logits that are no numbers."""
        return CheckpointError(
            f"{self.spec.model_folder}: the logits of a first pass are not finite numbers. The "
            f"checkpoint is damaged (fetch it again), or {self._half.dtype} is too narrow for it "
            "(model.dtype: bfloat16 or float32)"
        )

    def _accepted(self, sequence: Sequence) -> None:
        """The sequence joins the queue. What is raised here is its own failure; so is what making
        its hashes raises, which nobody should have to wait for in the middle of a batch."""
        _ = sequence.hashes

    def _next_batch(self) -> ScheduledBatch | None:
        """What to run now, if anything. Asked while nothing runs."""
        return self._scheduler.next_batch()

    def _completed(self, batch: ScheduledBatch) -> None:
        """The batch has run, and the scheduler knows."""

    def _after_step(self) -> None:
        """Once a turn."""

    # ---- life

    def start(self) -> None:
        self._started_s = monotonic_s()
        self._loop_thread.start()

    def stop(self) -> None:
        """Ends the loop, every thread and every link. Waiting requests get an error."""
        self._stopping.set()
        self._wake()
        if self._loop_thread.is_alive():
            self._loop_thread.join(10.0)
        try:
            self._clients.close()
        finally:
            self._close()

    def status(self) -> RankStatus:
        reason = self._reason or self._watch.problem
        return RankStatus(
            name=self.spec.name,
            healthy=not reason,
            reason=reason,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            epoch=self.spec.epoch,
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            sections={name: dict(read()) for name, read in self._sections.items()},
            notes={name: read() for name, read in self._notes.items()},
        )

    def _totals(self) -> dict[str, float]:
        """computed_tokens: that batches have run; those from the prefix cache are not among them.
        exposed_s: in which the rank waited while a payload for it was under way."""
        return {
            "computed_tokens": self._computed_tokens,
            "requeued": self._scheduler.requeued_total,
            "kv_evictions": self._blocks.evicted_total,
            "exposed_s": self._timeline.exposed_s,
        }

    def metrics(self) -> str:
        """Prometheus text of this rank."""
        return self._metrics.exposition()

    def spans(self) -> list[TaskSpan]:
        """The last recorded task spans of this rank."""
        return self._timeline.spans()

    def _observe(self, span: TaskSpan) -> None:
        self._watch.moved()
        self._metrics.span(span)

    def _load_half(self) -> AttentionHalf:
        spec, folder = self.spec, Path(self.spec.model_folder)
        model = check_checkpoint(folder)
        self._max_context_tokens = spec.config.model.context_tokens(model.max_context_tokens)
        return AttentionHalf.load(
            Checkpoint(folder),
            model,
            dtype=resolve_dtype(model, spec.config.model.dtype),
            device=torch.device(spec.device),
            progress=progress_line(spec.name, sys.stderr),
        )

    @property
    def _model(self) -> ModelSpec:
        return self._half.spec

    # ---- the loop

    def _run(self) -> None:
        """The loop. An error that nobody foresaw fails the rank by name instead of hanging it."""
        try:
            with torch.inference_mode():
                self._warm_up()
                while not self._stopping.is_set():
                    self._turn()
            self._fail_everything(NotReadyError(f"{self.spec.name} is shutting down"))
        except BaseException as error:
            self._reason = f"{self.spec.name} failed: {type(error).__name__}: {error}"
            log.critical("rank_failed reason=%s", self._reason, exc_info=True)
            self._tell_state()  # first: what fails here is not to be sent here again
            self._fail_everything(NotReadyError(self._reason))
            self._close()
            self._refuse_until_stopped()

    def _refuse_until_stopped(self) -> None:
        """Answers what comes in after a failure: nobody waits for a loop that has ended."""
        while not self._stopping.wait(IDLE_POLL_S):
            self._watch.moved()
            for received in self._clients.receive():
                self._take(received)

    def _turn(self) -> None:
        self._watch.moved()
        for received in self._clients.receive():
            self._take(received)
        if not self._executor.in_flight and not self._reason:
            batch = self._next_batch()
            if batch is not None:
                self._submit(batch)
        for done in self._step():
            self._computed_tokens += done.tokens
            self._scheduler.complete(done)
            self._completed(done)
        self._after_step()
        if self._executor.failure is not None and not self._reason:
            self._lose(self._executor.failure)
        self._send_answers()
        self._tell_state()
        self._check_when_idle()

    def _step(self) -> list[ScheduledBatch]:
        """The batches that are complete now. What this process has no memory or descriptors to send
        ends the requests it has, not the rank."""
        try:
            return self._executor.step(IDLE_POLL_S)
        except PeerError:
            raise
        except ChannelError as error:
            event(log, "batch_not_sent", logging.ERROR, rank=self.spec.name, reason=error)
            self._fail_everything(error)
            return []

    def _check_when_idle(self) -> None:
        """Holds the KV books against themselves once nothing has come for a while. It takes as long
        as a layer or more."""
        if len(self._scheduler):
            self._busy_s = monotonic_s()
        elif self._busy_s is not None and monotonic_s() - self._busy_s > CHECK_AFTER_S:
            self._busy_s = None
            self._blocks.check([])

    def _take(self, received: FromClient) -> None:
        client, message = received
        if message is None:
            for sequence in self._scheduler.sequences:
                if sequence.key[0] == client:
                    self._scheduler.cancel(sequence.key)
        elif isinstance(message, Cancel):
            self._scheduler.cancel((client, message.request_id))
        elif isinstance(message, Submit):
            self._admit(client, message)

    def _admit(self, client: int, submit: Submit) -> None:
        try:
            self._check(client, submit)
            sequence = Sequence((client, submit.request_id), submit, self._kv.block_tokens)
            self._accepted(sequence)
            self._scheduler.add(sequence)
        except Exception as error:  # noqa: BLE001 - of this sequence alone
            self._send(client, [failed_by(submit.request_id, error, TandemError)])

    def _check(self, client: int, submit: Submit) -> None:
        """Raises what is wrong with a request that only the rank can know."""
        if self._reason:
            raise NotReadyError(self._reason)
        self._admission.check(client, submit, self._scheduler)

    def _lose(self, error: ChannelError) -> None:
        """A peer is lost: every request on this rank ends with an error that names it."""
        self._reason = error.message
        event(log, "peer_lost", logging.ERROR, rank=self.spec.name, reason=error.message)
        self._tell_state()  # first: what fails here is not to be sent here again
        self._fail_everything(error)

    def _fail_everything(self, error: TandemError) -> None:
        for batch in self._executor.fail_all():
            self._scheduler.abandon(batch)
        for sequence in self._scheduler.sequences:
            if not sequence.done:
                self._finisher.answers.append((sequence, failed(sequence.submit.request_id, error)))
            self._scheduler.remove(sequence)
        self._send_answers()

    def _send_answers(self) -> None:
        for client, events in self._answers().items():
            self._send(client, events)

    def _answers(self) -> dict[int, list[Event]]:
        """What there is to tell each client since the last call."""
        answers, self._finisher.answers = self._finisher.answers, []
        by_client: defaultdict[int, list[Event]] = defaultdict(list)
        for sequence, answer in answers:
            by_client[sequence.key[0]].append(answer)
        return by_client

    def _send(self, client: int, events: list[Event]) -> None:
        self._clients.send(client, Events(events))

    def _tell_state(self) -> None:
        state = RankState(
            rank=self.spec.name,
            healthy=not self._reason,
            reason=self._reason,
            total_blocks=self._blocks.num_blocks,
        )
        self._clients.publish(state)
