"""A prefill worker of the router's simulation: queue, prefix cache, steps, and its log."""

from collections import OrderedDict, deque
from typing import Any, NamedTuple

from contracts.routing_messages import Calibration, Prompt, PromptProgress, WorkerReport
from planner.routing.open_requests import RequestWork
from planner.routing.worker_state import usable_tokens


class Machine(NamedTuple):
    """transfer_s: of all layers' experts in one pass; a step cannot be shorter (AsyncEP).
    saturation_flops: a step takes requests until it has this much work."""

    flops_per_s: float
    transfer_s: float
    saturation_flops: float
    cache_blocks: int
    block_tokens: int


class SimulatedWorker:
    """First come, first served. Siblings in one step share its blocks; then least recently used."""

    def __init__(self, number: int, machine: Machine, flops: RequestWork) -> None:
        self._number = number
        self._machine = machine
        self._flops = flops
        self._queue: deque[Prompt] = deque()
        self._cache: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._batch: list[Prompt] = []
        self._stored: list[bytes] = []
        self._reports = 0
        self.flops_done = 0
        self.cached_tokens = 0

    @property
    def is_idle(self) -> bool:
        return not self._batch

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def calibrate(self, calibration: Calibration) -> WorkerReport:
        return self._report(calibration=calibration)

    def accept(self, prompt: Prompt) -> WorkerReport:
        self._queue.append(prompt)
        return self._report(accepted=(prompt,))

    def start(self) -> tuple[float, WorkerReport]:
        """Seconds of the next step, and what the worker says when it begins."""
        machine, flops = self._machine, 0
        progress, in_use = [], 0
        while self._queue and flops < machine.saturation_flops:
            prompt = self._queue[0]
            in_use += len(prompt.hashes)
            if self._batch and in_use > machine.cache_blocks:
                break
            done_tokens = self._take(self._queue.popleft())
            progress.append(PromptProgress(prompt.key, done_tokens, prompt.prompt_tokens))
            flops += self._flops(done_tokens, prompt.prompt_tokens)
            self.cached_tokens += done_tokens
        self.flops_done += flops
        seconds = max(flops / machine.flops_per_s, machine.transfer_s)
        return seconds, self._report(progress=tuple(progress), evicted=self._evict())

    def finish(self) -> WorkerReport:
        """What the worker says when its step is done."""
        ended, stored = tuple(prompt.key for prompt in self._batch), tuple(self._stored)
        self._batch, self._stored = [], []
        return self._report(stored=stored, ended=ended)

    def _take(self, prompt: Prompt) -> int:
        """Puts a prompt into the step. Returns how many of its tokens are cached."""
        missing = (i for i, digest in enumerate(prompt.hashes) if digest not in self._cache)
        hits = next(missing, len(prompt.hashes))
        self._stored += [digest for digest in prompt.hashes if digest not in self._cache]
        for digest in reversed(prompt.hashes):  # so that a chain's end is evicted first
            self._cache[digest] = None
            self._cache.move_to_end(digest)
        self._batch.append(prompt)
        return usable_tokens(prompt, hits, self._machine.block_tokens)

    def _evict(self) -> tuple[bytes, ...]:
        evicted = []
        while len(self._cache) > self._machine.cache_blocks:
            evicted.append(self._cache.popitem(last=False)[0])
        return tuple(evicted)

    def _report(self, **parts: Any) -> WorkerReport:
        report = WorkerReport(worker=self._number, epoch=0, number=self._reports, **parts)
        self._reports += 1
        return report
