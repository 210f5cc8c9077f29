"""A prefill worker without a model: answers follow from the token ids alone, at once.

It takes part in everything else as a real one does: admission, batches, the prefix cache, the log,
heartbeats, metrics. So what is measured with it is the cost of all that is around the engine.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path

from actors.channels.loop_watch import LoopWatch
from actors.planning.model_shape import shape_of
from actors.ranks.pseudo_answers import pseudo_answer
from actors.ranks.worker_log import WorkerLog
from actors.telemetry.rank_metrics import RankMetrics
from actors.wire.client_server import ClientServer, FromClient, Joined
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.errors import NotReadyError, OverloadError, RequestError, TandemError, TooLongError
from contracts.events import TaskSpan
from contracts.messages import (
    Cancel,
    Event,
    Events,
    Failed,
    RankState,
    Submit,
)
from contracts.routing import Prompt, RequestKey
from contracts.worker import RankReady, RankStatus, WorkerSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.routing.request_work import work_of
from planner.routing.worker_state import usable_tokens

log = logging.getLogger("tandem.stub")

IDLE_POLL_S = 0.1
CACHED_BLOCKS = 1 << 16  # where kv.pool_tokens does not say


class _Waiting:
    """A request that has been accepted and not yet answered."""

    def __init__(self, client: int, submit: Submit, block_tokens: int) -> None:
        self.client = client
        self.submit = submit
        self.key = submit.key or RequestKey(-1 - client, submit.request_id)
        hashes = tuple(submit.block_hashes(block_tokens))
        self.prompt = Prompt(self.key, len(submit.token_ids), hashes)


class _Cache:
    """Hashes of blocks; the ones used longest ago make room."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[bytes]) -> int:
        for index, digest in enumerate(hashes):
            if digest not in self._blocks:
                return index
        return len(hashes)

    def put(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Which of them are new, and which others had to go."""
        new = [digest for digest in hashes if digest not in self._blocks]
        for digest in reversed(hashes):  # so that a chain's end goes before its beginning
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self) - self.max_blocks)]
        return new, gone


class StubWorker:
    """Made listening. Then: connect, start; status, metrics at any time; stop."""

    def __init__(self, spec: WorkerSpec) -> None:
        started_s = monotonic_s()
        self.spec = spec
        self._model = check_checkpoint(Path(spec.model_folder))
        stated_tokens = self._model.max_context_tokens
        self._max_context_tokens = spec.config.model.context_tokens(stated_tokens)
        self._block_tokens = spec.config.kv.block_tokens
        work = work_of(shape_of(self._model, resolve_dtype(self._model, spec.config.model.dtype)))
        self._log = WorkerLog(spec.rank, spec.epoch, work, self._block_tokens)
        self._waiting: OrderedDict[tuple[int, int], _Waiting] = OrderedDict()
        pool_tokens = spec.config.kv.pool_tokens or CACHED_BLOCKS * self._block_tokens
        self._cache = _Cache(max(1, pool_tokens // self._block_tokens))
        self._metrics = RankMetrics(spec, monotonic_s)
        self._metrics.read(metrics.LOAD, spec.name, of=lambda: self._log.load)
        self._metrics.read_blocks(lambda: self._kv_blocks)
        self._everybody: set[int] = set()
        self._answers: defaultdict[int, list[Event]] = defaultdict(list)
        self._started_s = 0.0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-loop", daemon=True)
        self._watch = LoopWatch(spec.name, spec.config.channel.stuck_s, monotonic_s)
        self._clients = ClientServer(
            spec.name, token=spec.token, wake=self._wake.set, watch=self._watch
        )
        self.ready = RankReady(
            name=spec.name,
            pid=os.getpid(),
            channel_address="",
            client_address=self._clients.listen(
                spec.host, deadline_s=spec.config.channel.deadline_s
            ),
            load_s=monotonic_s() - started_s,
            kv_blocks=self._cache.max_blocks,
        )

    def connect(self, addresses: dict[str, str]) -> None:
        """It needs nobody."""

    def start(self) -> None:
        self._started_s = monotonic_s()
        self._tell_state()
        self._thread.start()

    def join_planner(self, address: str) -> None:
        """It plans nothing."""

    def stop(self) -> None:
        """Ends the loop and the connections. Waiting requests get an error."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._clients.close()

    def status(self) -> RankStatus:
        return RankStatus(
            name=self.spec.name,
            healthy=not self._watch.problem,
            reason=self._watch.problem,
            waiting=len(self._waiting),
            uptime_s=monotonic_s() - self._started_s if self._started_s else 0.0,
            epoch=self.spec.epoch,
            sections={"kv_blocks": dict(self._kv_blocks)},
        )

    def metrics(self) -> str:
        """Prometheus text."""
        return self._metrics.exposition()

    def spans(self) -> list[TaskSpan]:
        """None: it computes nothing."""
        return []

    @property
    def _kv_blocks(self) -> dict[str, int]:
        cached = len(self._cache)
        return {"free": self._cache.max_blocks - cached, "used": 0, "cached": cached}

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(IDLE_POLL_S)
            self._wake.clear()
            self._turn()
        gone = NotReadyError(f"{self.spec.name} is shutting down")
        for waiting in self._waiting.values():
            self._answers[waiting.client].append(_failure(waiting.submit, gone))
        self._send()

    def _turn(self) -> None:
        """Takes what has come, answers a batch, tells everybody."""
        self._watch.moved()
        for received in self._clients.receive():
            self._take(received)
        for waiting in self._batch():
            self._finish(waiting)
        if self._waiting:
            self._wake.set()
        self._send()
        self._tell_state()

    def _take(self, received: FromClient) -> None:
        client, message = received
        if isinstance(message, Joined):
            self._send()  # what this turn has noted so far is in the snapshot
            self._everybody.add(client)
            self._clients.send(client, Events([self._log.snapshot()]))
        elif message is None:
            self._everybody.discard(client)
            for place in [place for place in self._waiting if place[0] == client]:
                self._log.ended(self._waiting.pop(place).key)
        elif isinstance(message, Cancel):
            waiting = self._waiting.pop((client, message.request_id), None)
            if waiting is not None:
                self._log.ended(waiting.key)
        else:
            self._admit(client, message)

    def _admit(self, client: int, submit: Submit) -> None:
        try:
            self._check(client, submit)
        except TandemError as error:
            self._answers[client].append(_failure(submit, error))
            return
        waiting = _Waiting(client, submit, self._block_tokens)
        self._waiting[client, submit.request_id] = waiting
        self._log.accepted(waiting.prompt)

    def _check(self, client: int, submit: Submit) -> None:
        """Raises what a real worker refuses."""
        if (client, submit.request_id) in self._waiting:
            raise RequestError(f"request_id {submit.request_id} is in use", "request_id")
        if len(self._waiting) >= self.spec.config.schedule.max_waiting:
            raise OverloadError(f"{self.spec.name}: {len(self._waiting)} requests wait", 1.0)
        if not 0 < len(submit.token_ids) <= self._max_context_tokens:
            raise TooLongError(
                f"{len(submit.token_ids)} tokens do not fit {self.spec.name}'s "
                f"{self._max_context_tokens} tokens; shorten the prompt",
                "prompt",
            )

    def _batch(self) -> list[_Waiting]:
        """The requests that a batch of a real worker could hold, at least one."""
        limits, tokens = self.spec.config.prefill, 0
        batch: list[_Waiting] = []
        for waiting in self._waiting.values():
            tokens += waiting.prompt.prompt_tokens
            too_many = tokens > limits.max_batch_tokens or len(batch) == limits.max_batch_sequences
            if batch and too_many:
                break
            batch.append(waiting)
        return batch

    def _finish(self, waiting: _Waiting) -> None:
        prompt, submit = waiting.prompt, waiting.submit
        del self._waiting[waiting.client, submit.request_id]
        blocks = self._cache.match(prompt.hashes)
        cached_tokens = usable_tokens(prompt, blocks, self._block_tokens)
        stored, evicted = self._cache.put(prompt.hashes)
        self._log.progressed(waiting.key, cached_tokens)
        self._log.stored(stored)
        self._log.evicted(evicted)
        self._log.ended(waiting.key)
        events = pseudo_answer(submit, cached_tokens, self._model.vocab_size)
        self._answers[waiting.client] += events

    def _send(self) -> None:
        """The turn's report goes to everybody, ahead of each client's own answers."""
        report = self._log.report()
        answers, self._answers = self._answers, defaultdict(list)
        for client in self._everybody if report is not None else answers:
            reports: list[Event] = [] if report is None else [report]
            self._clients.send(client, Events([*reports, *answers[client]]))

    def _tell_state(self) -> None:
        total_blocks = self._cache.max_blocks
        self._clients.publish(
            RankState(rank=self.spec.name, healthy=True, total_blocks=total_blocks)
        )


def _failure(submit: Submit, error: TandemError) -> Failed:
    return Failed(submit.request_id, error.code, error.message, error.status)
