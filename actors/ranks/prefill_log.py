"""What a prefill worker tells the routers: its log, kept in step with its serving loop."""

from __future__ import annotations

from actors.batching.observer import Observer, Serving
from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.sequence import Sequence
from actors.kv.block_manager import BlockManager
from actors.planning.calibration import Reference
from actors.ranks.batch_timing import BatchTiming
from actors.ranks.worker_log import WorkerLog
from actors.telemetry.rank_metrics import RankMetrics
from actors.wire.client_server import FromClient, Joined
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.errors import RequestError
from contracts.messages import Event, Submit
from contracts.routing import Prompt, RequestKey
from contracts.worker import WorkerSpec
from planner.routing.request_work import RequestWork
from planner.routing.saturation import saturation_of, threshold


class PrefillLog(Observer):
    """Reports go to all clients that have a snapshot, ahead of the answers that they go with."""

    def __init__(
        self,
        spec: WorkerSpec,
        work: RequestWork,
        blocks: BlockManager,
        max_context_tokens: int,
        telemetry: RankMetrics,
    ) -> None:
        """blocks: with a journal, which is read here."""
        telemetry.read(metrics.LOAD, spec.name, of=lambda: self._log.load)
        telemetry.read(metrics.SATURATION, spec.name, of=self._threshold)
        self.flops_per_s = telemetry.rate(lambda: self._computed_flops)
        self._name, self._kv_free = spec.name, spec.config.prefill.kv_free
        self._log = WorkerLog(spec.rank, spec.epoch, work, spec.config.kv.block_tokens)
        self._work, self._blocks = work, blocks
        self._saturation = saturation_of(spec.config.prefill, max_context_tokens)
        self._readers: set[int] = set()
        self._computed_flops = 0
        self._timing = BatchTiming(spec, work, monotonic_s)
        self._timing.show(telemetry)
        self._loop: Serving

    def calibrated(self, reference: Reference) -> None:
        self._log.calibrated(reference.calibration)
        self._timing.refer(reference.batches)

    def begin(self, loop: Serving) -> None:
        self._loop = loop

    def received(self, message: FromClient) -> None:
        client, what = message
        if isinstance(what, Joined):
            self._loop.send_answers()  # the snapshot is of what all others have been told
            self._loop.send(client, [self._log.snapshot()])
            self._readers.add(client)
        elif what is None:
            self._readers.discard(client)

    def check(self, client: int, submit: Submit) -> None:
        sampling = submit.sampling
        if self._kv_free and sampling is not None and sampling.max_tokens > 1:
            raise RequestError(
                f"max_tokens={sampling.max_tokens}: {self._name} keeps no KV cache and can "
                "generate one token; set prefill.kv_free=false, or deploy attention ranks",
                "max_tokens",
            )
        if submit.key is not None and submit.key.router < 0:
            raise RequestError(f"key.router={submit.key.router}: 0 or more", "key")
        if log_key(client, submit) in self._log:
            raise RequestError(f"key {tuple(log_key(client, submit))} is in use", "key")

    def accepted(self, sequence: Sequence) -> None:
        key = log_key(sequence.key[0], sequence.submit)
        if self._log.ends(key):  # parts of a report are read in order: it would be open twice
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
        stored, evicted = self._blocks.take_changes()
        self._log.stored(stored)
        self._log.evicted(evicted)

    def ended(self, sequence: Sequence) -> None:
        self._log.ended(log_key(sequence.key[0], sequence.submit))

    def answers(self, by_client: dict[int, list[Event]]) -> None:
        report = self._log.report()
        if report is not None:
            for client in self._readers:
                by_client[client] = [report, *by_client.get(client, [])]

    def sections(self) -> dict[str, dict[str, float]]:
        """work: the load and where it saturates, in FLOPs, or in tokens where those cannot be
        counted; and what was computed."""
        work: dict[str, float] = {
            "load": self._log.load,
            "saturation": self._threshold(),
            "computed_flops": self._computed_flops,
        }
        return {"work": work}

    def _threshold(self) -> int:
        """Of saturation, in the unit of the log's load."""
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
    """The router's key, or one that no router uses."""
    return submit.key or RequestKey(-1 - client, submit.request_id)
