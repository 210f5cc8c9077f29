"""A prefill worker's log of changes, reported to the routers in step with its serving loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.observer import LoopControl, Observer
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.planning.calibration import Reference, TimedBatch
from actors.rpc.client_server import ClientJoined, ClientMessage
from actors.telemetry.telemetry import RankMetrics, Telemetry
from contracts import metrics
from contracts.clock import Clock, monotonic_s
from contracts.errors import RequestError
from contracts.messages import Event, Submit
from contracts.metrics import Pipeline
from contracts.ranks import Group, RankSpec
from contracts.requests import Priority
from contracts.routing_messages import (
    Calibration,
    Prompt,
    PromptProgress,
    RequestKey,
    WorkerReport,
    WorkerSnapshot,
)
from planner.online.capacity import Batch, PrefillCapacity, ReferenceTime
from planner.routing.open_requests import RequestWork
from planner.routing.worker_state import WorkerState, saturation_of, threshold


class WorkerLog:
    """Owned by the loop thread."""

    def __init__(self, worker: int, epoch: int, work: RequestWork, block_tokens: int) -> None:
        self._worker = worker
        self._epoch = epoch
        self._state = WorkerState(work, block_tokens)
        self._number = -1
        self._calibration: Calibration | None = None
        self._accepted: list[Prompt] = []
        self._progress: dict[RequestKey, PromptProgress] = {}
        self._cache: dict[bytes, bool] = {}  # latest state by block
        self._ended: list[RequestKey] = []
        self._open: set[RequestKey] = set()

    def __contains__(self, key: RequestKey) -> bool:
        """Return True if a request with this key is open."""
        return key in self._open

    def ends(self, key: RequestKey) -> bool:
        """Return True if the next report ends this request."""
        return key in self._ended

    @property
    def load(self) -> int:
        """Work of the open requests, as of the last report."""
        return self._state.requests.visible_to(Priority.BE).load

    @property
    def calibration(self) -> Calibration | None:
        """The calibration last reported."""
        return self._state.calibration

    def calibrated(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def accepted(self, prompt: Prompt) -> None:
        self._open.add(prompt.key)
        self._accepted.append(prompt)

    def progressed(self, key: RequestKey, done_tokens: int, until_tokens: int = 0) -> None:
        self._progress[key] = PromptProgress(key, done_tokens, until_tokens)

    def cached(self, changes: Mapping[bytes, bool]) -> None:
        """Note whether blocks are cached, by digest."""
        self._cache.update(changes)

    def ended(self, key: RequestKey) -> None:
        self._open.remove(key)
        self._ended.append(key)

    def report(self) -> WorkerReport | None:
        """Return the changes since the last report, or None if there are none."""
        noted = (self._accepted, self._progress, self._cache, self._ended)
        if self._calibration is None and not any(noted):
            return None
        self._number += 1
        report = WorkerReport(
            worker=self._worker,
            epoch=self._epoch,
            number=self._number,
            calibration=self._calibration,
            accepted=tuple(self._accepted),
            progress=tuple(self._progress.values()),
            stored=tuple(digest for digest, held in self._cache.items() if held),
            evicted=tuple(digest for digest, held in self._cache.items() if not held),
            ended=tuple(self._ended),
        )
        self._calibration = None
        self._accepted, self._progress, self._cache, self._ended = [], {}, {}, []
        self._state.apply(report)
        return report

    def snapshot(self) -> WorkerSnapshot:
        """Return the sum of all reports, for a new client."""
        folded = self._state.snapshot(self._worker)
        return msgspec.structs.replace(folded, epoch=self._epoch)  # the fold has none at first


class PrefillLog(Observer):
    """Sends reports to all clients that have a snapshot, ahead of the answers that they cover."""

    def __init__(
        self,
        spec: RankSpec,
        work: RequestWork,
        blocks: BlockManager,
        max_context_tokens: int,
        telemetry: RankMetrics,
    ) -> None:
        """blocks: with a journal, which this log consumes."""
        telemetry.read(metrics.LOAD, spec.name, of=lambda: self._log.load)
        telemetry.read(metrics.SATURATION, spec.name, of=self._threshold)
        self.flops_per_s = telemetry.rate(lambda: self._computed_flops)
        self._name, self._disable_kv_cache = spec.name, spec.config.prefill.disable_kv_cache
        self._log = WorkerLog(spec.rank, spec.epoch, work, spec.config.kv.block_tokens)
        self._work, self._blocks = work, blocks
        self._saturation = saturation_of(spec.config.prefill, max_context_tokens)
        self._subscribers: set[int] = set()
        self._computed_flops = 0
        self._timing = BatchTiming(spec, work, monotonic_s)
        self._timing.register_metrics(telemetry)
        self._loop: LoopControl

    def calibrated(self, reference: Reference) -> None:
        self._log.calibrated(reference.calibration)
        self._timing.refer(reference.batches)

    def begin(self, loop: LoopControl) -> None:
        self._loop = loop

    def received(self, message: ClientMessage) -> None:
        client, what = message
        if isinstance(what, ClientJoined):
            self._loop.send_answers()  # so that the snapshot agrees with all reports
            self._loop.send(client, [self._log.snapshot()])
            self._subscribers.add(client)
        elif what is None:
            self._subscribers.discard(client)

    def check(self, client: int, submit: Submit) -> None:
        sampling = submit.sampling
        if self._disable_kv_cache and sampling is not None and sampling.max_tokens > 1:
            raise RequestError(
                f"max_tokens={sampling.max_tokens}: {self._name} keeps no KV cache and can "
                "generate one token; set prefill.disable_kv_cache=false, or deploy attention ranks",
                "max_tokens",
            )
        if submit.key is not None and submit.key.router < 0:
            raise RequestError(f"key.router={submit.key.router}: 0 or more", "key")
        if log_key(client, submit) in self._log:
            raise RequestError(f"key {tuple(log_key(client, submit))} is in use", "key")

    def accepted(self, sequence: Sequence) -> None:
        key = log_key(sequence.key[0], sequence.submit)
        if self._log.ends(key):  # in one report, its start would precede its end
            self._loop.send_answers()
        hashes, tokens = tuple(sequence.hashes), len(sequence.submit.token_ids)
        self._log.accepted(Prompt(key, tokens, hashes, sequence.submit.priority))

    def formed(self, batch: ScheduledBatch) -> None:
        self._timing.formed(batch)
        for chunk in batch.chunks:
            self._computed_flops += self._work(chunk.start, chunk.stop)
            self._advance(chunk.sequence, chunk.start, chunk.stop)

    def dropped(self, batch: ScheduledBatch) -> None:
        self._timing.dropped(batch)

    def completed(self, batch: ScheduledBatch) -> None:
        self._timing.completed(batch)
        for chunk in batch.chunks:
            self._advance(chunk.sequence, chunk.stop)
        self._log.cached(self._blocks.take_changes())

    def ended(self, sequence: Sequence) -> None:
        self._log.ended(log_key(sequence.key[0], sequence.submit))

    def answers(self, by_client: dict[int, list[Event]]) -> None:
        report = self._log.report()
        if report is not None:
            for client in self._subscribers:
                by_client[client] = [report, *by_client.get(client, [])]

    def sections(self) -> dict[str, dict[str, float]]:
        """Return load, saturation and computed FLOPs; tokens if FLOPs cannot be counted."""
        work: dict[str, float] = {
            "load": self._log.load,
            "saturation": self._threshold(),
            "computed_flops": self._computed_flops,
        }
        return {"work": work}

    def _threshold(self) -> int:
        return threshold(self._saturation, self._work, self._log.calibration)

    def _advance(self, sequence: Sequence, done_tokens: int, until_tokens: int = 0) -> None:
        submit = sequence.submit
        key, prompt_tokens = log_key(sequence.key[0], submit), len(submit.token_ids)
        if key in self._log:
            done_tokens, until_tokens = (
                min(done_tokens, prompt_tokens),
                min(until_tokens, prompt_tokens),
            )
            self._log.progressed(key, done_tokens, until_tokens)


def log_key(client: int, submit: Submit) -> RequestKey:
    """Return the router's key, or a key that no router uses."""
    return submit.key or RequestKey(-1 - client, submit.request_id)


class BatchTiming:
    """Times batches that run alone. Owned by the loop's thread."""

    def __init__(self, spec: RankSpec, work: RequestWork, clock: Clock) -> None:
        prefill = spec.config.prefill
        self._spec, self._work, self._clock = spec, work, clock
        self._running: dict[int, float | None] = {}  # start by number; None: not alone
        self._capacity = PrefillCapacity(
            max_tokens=prefill.max_batch_tokens,
            max_sequences=prefill.max_batch_sequences,
            started_s=clock(),
        )

    def refer(self, batches: Iterable[TimedBatch]) -> None:
        """Set the reference times, before the first batch."""
        self._capacity.refer(
            [
                ReferenceTime(sum(self._work(0, tokens) for tokens in prompts), 1e3 * seconds)
                for prompts, seconds in batches
            ]
        )

    def register_metrics(self, telemetry: Telemetry) -> None:
        """Register the metrics. Each further worker adds the same capacity."""
        telemetry.read(
            metrics.CAPACITY_USED,
            Pipeline.PREFILL,
            self._spec.name,
            of=lambda: self._capacity.used_fraction(self._clock()),
        )
        workers = max(1, self._spec.config.groups.prefill_ranks)
        telemetry.set(metrics.CAPACITY_GAIN, Pipeline.PREFILL, Group.PREFILL, to=1 / workers)

    def formed(self, batch: ScheduledBatch) -> None:
        if self._running:
            self._running = dict.fromkeys((*self._running, batch.number))
        else:
            self._running[batch.number] = self._clock()

    def dropped(self, batch: ScheduledBatch) -> None:
        self._running.pop(batch.number, None)

    def completed(self, batch: ScheduledBatch) -> None:
        start_s, now_s = self._running.pop(batch.number, None), self._clock()
        self._capacity.add(
            Batch(
                ended_s=now_s,
                flops=sum(self._work(chunk.start, chunk.stop) for chunk in batch.chunks),
                tokens=batch.tokens,
                sequences=len(batch.chunks),
                ms=None if start_s is None else 1e3 * (now_s - start_s),
            )
        )
