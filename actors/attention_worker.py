"""An attention rank: takes sequences from clients, batches them, runs them, answers.

A plain class: Ray (actors/remote.py) and plain processes (actors/process.py) are thin shells around
it. Three threads: the loop (everything with tensors), the clients' I/O, the channels' heartbeats.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path

import torch

from actors.block_manager import BlockManager
from actors.channels.factory import rank_endpoint
from actors.client_server import ClientServer, FromClient
from actors.executor import Executor, ExecutorParts
from actors.finisher import Finisher
from actors.memory import keep_freed_memory, kv_pool_blocks
from actors.rank_metrics import RankMetrics
from actors.rank_planning import RankPlanning
from actors.scheduler import Scheduler
from actors.sequence import Sequence
from actors.timeline import Timeline
from contracts.clock import monotonic_s
from contracts.errors import (
    ChannelError,
    NotReadyError,
    OverloadError,
    PeerError,
    RequestError,
    TandemError,
    TooLongError,
)
from contracts.events import TaskSpan
from contracts.messages import Cancel, Event, Events, Failed, RankState, Submit
from contracts.plan import Plan
from contracts.requests import Sampling
from contracts.worker import Group, RankReady, RankStatus, WorkerSpec, rank_name
from models.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.decoder import AttentionHalf
from models.kv_pool import KvPool
from models.layout import attention_parameters
from models.loading import progress_line
from models.spec import ModelSpec
from planner.placement import ExpertPlacement

log = logging.getLogger("tandem.attention")

STATE_PERIOD_S = 0.05
IDLE_POLL_S = 0.1
CHECK_PERIOD_S = 10.0
NOBODY = -1  # no client has this number
WARM_UP_IDS = list(range(64))  # enough for two micro-batches, and for many experts
WARM_UP = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)


class AttentionWorker:
    """Made with its weights loaded. Then: connect, start; status, spans at any time; stop."""

    def __init__(self, spec: WorkerSpec) -> None:
        started_s = monotonic_s()
        config = spec.config
        torch.set_num_threads(config.groups.torch_threads)
        keep_freed_memory()
        self.spec = spec
        self._stopping = threading.Event()
        self._loop_thread = threading.Thread(target=self._run, name=f"{spec.name}-loop")
        self._metrics = RankMetrics(spec, monotonic_s)
        self._timeline = Timeline(config.trace.spans, self._observe)
        self._reason = ""  # why this rank cannot serve; empty: it can
        self._last_state_s = 0.0
        self._checked_s = monotonic_s()
        self._started_s = 0.0
        self._upcoming_changed = False
        self._load(spec)
        self._planning = RankPlanning(
            spec, chunk_cost=ChunkCost(self._half.spec), clock=monotonic_s
        )
        self._endpoint = rank_endpoint(spec, self._half.device, monotonic_s)
        self._executor = self._make_executor()
        self._clients = ClientServer(spec.name, token=spec.token, wake=self._endpoint.wake)
        self.ready = RankReady(
            name=spec.name,
            pid=os.getpid(),
            channel_address="",
            client_address=self._clients.listen(spec.host, deadline_s=config.channel.deadline_s),
            load_s=monotonic_s() - started_s,
            kv_blocks=self._blocks.num_blocks,
        )

    def _load(self, spec: WorkerSpec) -> None:
        """The attention half, the KV pool, and what is sized by them."""
        config, device, folder = spec.config, torch.device(spec.device), Path(spec.model_folder)
        model = check_checkpoint(folder)
        dtype = resolve_dtype(model, config.model.dtype)
        limit = config.model.max_context_tokens or model.max_context_tokens
        self._max_context_tokens = min(model.max_context_tokens, limit)
        self._half = AttentionHalf.load(
            Checkpoint(folder),
            model,
            dtype=dtype,
            device=device,
            progress=progress_line(spec.name, sys.stderr),
        )
        num_blocks = kv_pool_blocks(model, dtype, config, device, ranks_on_node=spec.ranks_on_node)
        self._kv = KvPool(model, num_blocks, config.kv.block_tokens, dtype, device)
        self._blocks = BlockManager(num_blocks, prefix_cache=config.kv.prefix_cache)
        self._scheduler = Scheduler(config.schedule, self._blocks)
        self._finisher = Finisher(self._half, max_context_tokens=self._max_context_tokens)

    def connect(self, addresses: dict[str, str]) -> None:
        """Joins the expert ranks: name -> channel address."""
        for peer, address in addresses.items():
            try:
                self._endpoint.connect(peer, address)
            except ChannelError as error:  # says what happened, but not always to whom
                message = f"cannot join {peer}: {error.message}"
                raise type(error)(message, *error.args[1:]) from None

    def start(self) -> None:
        """The first batch is our own, answered to nobody: it takes several times as long."""
        self._started_s = monotonic_s()
        self._admit(NOBODY, Submit(request_id=0, token_ids=WARM_UP_IDS, sampling=WARM_UP))
        self._loop_thread.start()

    def pin_plan(self, plan: Plan | None) -> None:
        """Batches formed from now on run under `plan` (None: under one chosen for each)."""
        self._planning.pin(plan)

    def join_planner(self, address: str) -> None:
        """Asks the planner there for the plans of batches from now on."""
        self._planning.join(address)

    def stop(self) -> None:
        """Ends the loop, every thread and every link. Waiting requests get an error."""
        self._stopping.set()
        self._endpoint.wake()
        if self._loop_thread.is_alive():
            self._loop_thread.join(10.0)
        try:
            self._clients.close()
            self._planning.close()
        finally:
            self._endpoint.close()

    def status(self) -> RankStatus:
        sent, received = self._endpoint.bytes_moved()
        return RankStatus(
            name=self.spec.name,
            healthy=not self._reason,
            reason=self._reason,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_blocks=self._blocks.counts,
            stage_s={stage.value: s for stage, s in self._timeline.stage_seconds.items()},
            exposed_s=self._timeline.exposed_s,
            bytes_sent=sent,
            bytes_received=received,
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            epoch=self.spec.epoch,
            batches=dict(self._planning.batches),
            kv_evictions=self._blocks.evicted_total,
            requeued=self._scheduler.requeued_total,
            planner=self._planning.state,
            chosen=dict(self._planning.chosen),
        )

    def metrics(self) -> str:
        """Prometheus text of this rank."""
        return self._metrics.text(self.status())

    def spans(self) -> list[TaskSpan]:
        """The last recorded task spans of this rank."""
        return self._timeline.spans()

    def _observe(self, span: TaskSpan) -> None:
        self._metrics.observe(span)
        self._planning.observe(span)

    def _make_executor(self) -> Executor:
        model, expert_ranks = self._half.spec, self.spec.expert_ranks
        parts = ExecutorParts(
            half=self._half,
            kv=self._kv,
            endpoint=self._endpoint,
            placement=ExpertPlacement.contiguous(model.num_experts, expert_ranks),
            expert_ranks=[rank_name(Group.EXPERT, rank) for rank in range(expert_ranks)],
            sink=self._finisher,
            timeline=self._timeline,
            clock=monotonic_s,
        )
        return Executor(parts, chunk_cost=ChunkCost(model))

    def _run(self) -> None:
        """The loop. An error that nobody foresaw fails the rank by name instead of hanging it."""
        try:
            with torch.inference_mode():
                while not self._stopping.is_set():
                    self._turn()
            self._fail_everything(NotReadyError(f"{self.spec.name} is shutting down"))
        except BaseException as error:
            self._reason = f"{self.spec.name} failed: {type(error).__name__}: {error}"
            log.critical("rank_failed reason=%s", self._reason, exc_info=True)
            self._fail_everything(NotReadyError(self._reason))
            self._tell_state(force=True)
            self._endpoint.close()
            self._refuse_until_stopped()

    def _refuse_until_stopped(self) -> None:
        """Answers what comes in after a failure: nobody waits for a loop that has ended."""
        while not self._stopping.wait(IDLE_POLL_S):
            for received in self._clients.receive():
                self._take(received)

    def _turn(self) -> None:
        for received in self._clients.receive():
            self._take(received)
            self._upcoming_changed = True
        if not self._executor.in_flight and not self._reason:
            batch = self._scheduler.next_batch()
            if batch is not None:
                self._executor.submit(batch, self._planning.choose(batch))
                self._upcoming_changed = True
        for done in self._executor.step(IDLE_POLL_S):
            self._scheduler.complete(done)
            self._planning.finished(done)
        if self._upcoming_changed and self._executor.in_flight:  # experts have work meanwhile
            self._upcoming_changed = False
            self._planning.look_ahead(self._scheduler.upcoming())
        if self._executor.lost is not None and not self._reason:
            self._lose(self._executor.lost.error)
        self._send_answers()
        self._tell_state()
        self._check_when_idle()

    def _check_when_idle(self) -> None:
        """Holds the KV books against themselves, now and then, when there is nothing to do."""
        now_s = monotonic_s()
        if len(self._scheduler) == 0 and now_s - self._checked_s > CHECK_PERIOD_S:
            self._checked_s = now_s
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
        except TandemError as error:
            self._send(client, [_failure(submit.request_id, error)])
            return
        block_tokens = self.spec.config.kv.block_tokens
        self._scheduler.add(Sequence((client, submit.request_id), submit, block_tokens))

    def _check(self, client: int, submit: Submit) -> None:
        """Raises what is wrong with a request that only the rank can know."""
        if self._reason:
            raise NotReadyError(self._reason)
        if self._scheduler.has((client, submit.request_id)):
            raise RequestError(f"request_id {submit.request_id} is in use", "request_id")
        self._check_token_ids(submit)
        if self._scheduler.waiting >= self.spec.config.schedule.max_waiting:
            raise OverloadError(f"{self.spec.name}: {self._scheduler.waiting} requests wait", 1.0)
        tokens = len(submit.token_ids)
        if submit.sampling is not None:
            tokens = min(tokens + submit.sampling.max_tokens, self._max_context_tokens)
        pool_tokens = self._blocks.num_blocks * self._kv.block_tokens
        if not 0 < len(submit.token_ids) <= self._max_context_tokens or tokens > pool_tokens:
            limit = min(pool_tokens, self._max_context_tokens)
            raise TooLongError(
                f"{tokens} tokens do not fit {self.spec.name}'s {limit} tokens; shorten the prompt "
                "or raise kv.pool_tokens",
                "prompt",
            )

    def _check_token_ids(self, submit: Submit) -> None:
        """The HTTP side checks these too; but one bad id in a batch would end the whole rank."""
        vocabulary = self._half.spec.vocab_size
        for field, ids in (("token_ids", submit.token_ids), ("candidates", submit.candidates)):
            if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
                raise RequestError(f"{field}: ids must be from 0 to {vocabulary - 1}", field)

    def _lose(self, error: PeerError) -> None:
        """An expert rank is lost: every request on this rank ends with an error that names it."""
        self._reason = error.message
        log.error("peer_lost rank=%s reason=%s", self.spec.name, error.message)
        self._fail_everything(error)
        self._tell_state(force=True)

    def _fail_everything(self, error: TandemError) -> None:
        for batch in self._executor.fail_all():
            self._scheduler.abandon(batch)
        for sequence in self._scheduler.sequences:
            if not sequence.done:
                failed = _failure(sequence.submit.request_id, error)
                self._finisher.answers.append((sequence, failed))
            self._scheduler.remove(sequence)
        self._send_answers()

    def _send_answers(self) -> None:
        answers, self._finisher.answers = self._finisher.answers, []
        by_client: defaultdict[int, list[Event]] = defaultdict(list)
        for sequence, event in answers:
            by_client[sequence.key[0]].append(event)
        for client, events in by_client.items():
            self._send(client, events)

    def _send(self, client: int, events: list[Event]) -> None:
        self._clients.send(client, Events(events))

    def _tell_state(self, *, force: bool = False) -> None:
        now_s = monotonic_s()
        if not force and now_s - self._last_state_s < STATE_PERIOD_S:
            return
        self._last_state_s = now_s
        self._clients.publish(self._state())

    def _state(self) -> RankState:
        counts = self._blocks.counts
        return RankState(
            rank=self.spec.name,
            healthy=not self._reason,
            reason=self._reason,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            free_blocks=counts["free"] + counts["cached"],
            total_blocks=self._blocks.num_blocks,
        )


class ChunkCost:
    """Relative attention cost of new tokens [start, stop) of a sequence: projections of each token,
    plus scores and weighted values over its context (FinDEP Eq. 1, for grouped-query attention)."""

    def __init__(self, model: ModelSpec) -> None:
        attended_flops = 4 * model.num_heads * model.head_dim
        linear_flops = 2 * attention_parameters(model)
        self._linear_tokens = linear_flops / attended_flops  # in units of one attended token

    def __call__(self, start: int, stop: int) -> float:
        return (stop - start) * (self._linear_tokens + (start + stop) / 2)


def _failure(request_id: int, error: TandemError) -> Failed:
    return Failed(request_id, error.code, error.message, error.status)
