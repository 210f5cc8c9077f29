"""A prefill worker: all of the model, its experts from a store; and a log for the routers.

It generates too, where it has a KV pool: one token per sequence and batch.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec
import torch

from actors.batching.scheduled_batch import ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.engine.executor import Executor, ExecutorParts
from actors.engine.timed_layers import time_layers
from actors.experts.expert_supply import expert_supply
from actors.kv.block_manager import BlockManager
from actors.planning.calibration import calibrate, product_flops_per_s
from actors.planning.model_shape import shape_of
from actors.ranks.memory import kv_pool_blocks
from actors.ranks.serving_worker import ServingWorker
from actors.ranks.worker_log import WorkerLog
from actors.telemetry.rank_metrics import channel_bytes
from actors.wire.client_server import FromClient, Joined
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.config import ScheduleConfig
from contracts.errors import ChannelError, NotFiniteError, RequestError
from contracts.messages import Event, Submit
from contracts.plan import Plan
from contracts.routing import Prompt, RequestKey
from models.decoder.batch import SequenceSlice
from models.decoder.kv_pool import KvPool
from planner.findep.orders import by_layer
from planner.routing.request_work import work_of
from planner.routing.saturation import saturation_of, threshold

_WHOLE = Plan()  # one micro-batch


class PrefillWorker(ServingWorker):
    """Copies of experts run on threads of their own."""

    _executor: Executor

    @property
    def _schedule(self) -> ScheduleConfig:
        prefill = self.spec.config.prefill
        return msgspec.structs.replace(
            self.spec.config.schedule,
            max_batch_tokens=prefill.max_batch_tokens,
            max_batch_sequences=prefill.max_batch_sequences,
        )

    def _make_pool(self) -> None:
        config, half = self.spec.config, self._half
        kv, free = config.kv, config.prefill.kv_free
        if free:
            longest = max(self._schedule.max_batch_tokens, self._max_context_tokens)
            blocks = -(-longest // kv.block_tokens) + 2 * self._schedule.max_batch_sequences
        else:
            sized = msgspec.structs.replace(config, schedule=self._schedule)
            blocks = kv_pool_blocks(
                half.spec, half.dtype, sized, half.device, ranks_on_node=self.spec.ranks_on_node
            )
        self._kv = KvPool(
            half.spec, blocks, kv.block_tokens, half.dtype, half.device, one_layer=free
        )
        self._blocks = BlockManager(
            blocks,
            prefix_cache=kv.prefix_cache,
            share_partial=kv.share_partial_blocks,
            keeps=not free,
            journal=True,
        )
        self._scheduler = Scheduler(
            self._schedule, self._blocks, whole_prompts=free, on_end=self._ended
        )

    def _open(self) -> None:
        spec, half = self.spec, self._half
        prefill = spec.config.prefill
        self._work = work_of(shape_of(half.spec, half.dtype))
        self._saturation = saturation_of(prefill, self._max_context_tokens)
        self._log = WorkerLog(spec.rank, spec.epoch, self._work, self._kv.block_tokens)
        self._readers: set[int] = set()  # clients that have a snapshot
        self._computed_flops = 0
        self._peak_flops_per_s = 0.0
        self._supply = expert_supply(spec, half.spec, half.dtype, self._timeline)
        self._channel_address = self._supply.address
        self._metrics.follow(self._timeline, self._supply.bytes_moved)
        self._sections |= {
            "channel_bytes": lambda: channel_bytes(self._supply.bytes_moved()),
            "work": self._loads,
        }
        self._notes["degraded"] = lambda: self._supply.degraded
        self._metrics.read(metrics.LOAD, spec.name, of=lambda: self._log.load)
        self._metrics.read(metrics.SATURATION, spec.name, of=self._threshold)
        self._parts = ExecutorParts(
            name=spec.name,
            half=half,
            kv=self._kv,
            plane=self._supply.plane(half),
            sink=self._finisher,
            timeline=self._timeline,
            clock=monotonic_s,
        )
        self._executor = Executor(
            self._parts,
            chunk_cost=lambda start, stop: float(stop - start),
            policy=by_layer,
            wanted_rows_only=True,
        )

    def _wake(self) -> None:
        self._executor.wake()

    def _close(self) -> None:
        self._supply.close()

    def connect(self, addresses: dict[str, str]) -> None:
        """Joins the other prefill workers: name -> channel address. Again when one was replaced."""
        peers = {name: at for name, at in addresses.items() if name != self.spec.name}
        self._supply.connect(peers)

    def _loads(self) -> dict[str, float]:
        """load, and where it saturates; what was computed, and a large product's rate here."""
        return {
            "load": self._log.load,
            "saturation": self._threshold(),
            "computed_flops": self._computed_flops,
            "peak_flops_per_s": self._peak_flops_per_s,
        }

    def _threshold(self) -> int:
        """Of saturation, in the unit of the log's load."""
        return threshold(self._saturation, self._work, self._log.calibration)

    # ---- start-up

    def _warm_up(self) -> None:
        """The reference pass, in the place of a first batch; then the first report."""
        self._tell_state()
        half, rate = self._half, self._metrics.rate(lambda: self._computed_flops)
        peak = self._peak_flops_per_s = product_flops_per_s(half.dtype, half.device, monotonic_s)
        if peak > 0:
            name = self.spec.name
            self._metrics.read(metrics.MODEL_FLOPS_UTILIZATION, name, of=lambda: rate() / peak)
        try:
            self._calibrate()
        except ChannelError as error:
            self._lose(error)
        except NotFiniteError:
            raise self._unusable() from None

    def _calibrate(self) -> None:
        prefill = self.spec.config.prefill
        pool_tokens = self._kv.num_blocks * self._kv.block_tokens
        context_tokens = min(self._max_context_tokens, pool_tokens)
        max_tokens = min(prefill.max_batch_tokens, pool_tokens // 2)
        if prefill.saturation is not None or max_tokens == 0 or prefill.experts == "all_to_all":
            return  # in lockstep a layer lasts as long as the slowest worker's
        calibration = calibrate(
            self._time_layers, max_tokens=max_tokens, context_tokens=context_tokens
        )
        self._log.calibrated(calibration)

    def _time_layers(self, lengths: SequenceOf[int]) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        slices, first = [], 0
        for tokens in lengths:
            ids = torch.randint(self._model.vocab_size, (tokens,), generator=generator)
            last = first + -(-tokens // self._kv.block_tokens)
            slices.append(SequenceSlice(ids.tolist(), 0, range(first, last)))
            first = last
        return time_layers(self._parts, slices)

    # ---- requests, batches, and what the log says of them

    def _check(self, client: int, submit: Submit) -> None:
        super()._check(client, submit)
        sampling = submit.sampling
        if self.spec.config.prefill.kv_free and sampling is not None and sampling.max_tokens > 1:
            raise RequestError(
                f"max_tokens={sampling.max_tokens}: {self.spec.name} keeps no KV cache and can "
                "generate one token; set prefill.kv_free=false, or deploy attention ranks",
                "max_tokens",
            )
        if submit.key is not None and submit.key.router < 0:
            raise RequestError(f"key.router={submit.key.router}: 0 or more", "key")
        if log_key(client, submit) in self._log:
            raise RequestError(f"key {tuple(log_key(client, submit))} is in use", "key")

    def _take(self, received: FromClient) -> None:
        client, message = received
        if isinstance(message, Joined):
            self._send_answers()  # the snapshot is of what all others have been told
            self._send(client, [self._log.snapshot()])
            self._readers.add(client)
        elif message is None:
            self._readers.discard(client)
        super()._take(received)

    def _accepted(self, sequence: Sequence) -> None:
        key = log_key(sequence.key[0], sequence.submit)
        if self._log.ends(key):  # parts of a report are read in order: it would be open twice
            self._send_answers()
        self._log.accepted(Prompt(key, sequence.prompt_tokens, tuple(sequence.hashes)))

    def _ended(self, sequence: Sequence) -> None:
        self._log.ended(log_key(sequence.key[0], sequence.submit))

    def _submit(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            self._computed_flops += self._work(chunk.start, chunk.stop)
            self._advance(chunk.sequence, chunk.start, chunk.stop)
        self._executor.submit(batch, _WHOLE)

    def _completed(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            self._advance(chunk.sequence, chunk.stop)
        stored, evicted = self._blocks.take_changes()
        self._log.stored(stored)
        self._log.evicted(evicted)

    def _advance(self, sequence: Sequence, done_tokens: int, until_tokens: int = 0) -> None:
        key, prompt_tokens = log_key(sequence.key[0], sequence.submit), sequence.prompt_tokens
        if key in self._log:
            done_tokens, until_tokens = (
                min(done_tokens, prompt_tokens),
                min(until_tokens, prompt_tokens),
            )
            self._log.progressed(key, done_tokens, until_tokens)

    def _answers(self) -> dict[int, list[Event]]:
        """Reports go to all who read the log, before the answers that they go with."""
        answers, report = super()._answers(), self._log.report()
        if report is not None:
            for client in self._readers:
                answers[client] = [report, *answers.get(client, [])]
        return answers


def log_key(client: int, submit: Submit) -> RequestKey:
    """The router's key, or one that no router uses."""
    return submit.key or RequestKey(-1 - client, submit.request_id)
