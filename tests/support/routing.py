"""A prefill worker that keeps a log, and small prompts, for tests of the router."""

from collections import OrderedDict
from typing import Any

from hypothesis import strategies as st

from contracts.requests import chain_hashes
from contracts.routing_messages import Calibration, Prompt, PromptProgress, RequestKey, WorkerReport
from planner.routing.open_requests import RequestWork
from planner.routing.worker_state import WorkerState, usable_tokens

BLOCK = 4
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=5 * BLOCK)
calibrations = st.builds(
    lambda first, stretch, prompts: Calibration(
        first_layer_s=first, slowest_layer_s=first * stretch, reference_prompts=tuple(prompts)
    ),
    st.floats(1e-4, 1.0),
    st.floats(1.0, 50.0),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
)


def quadratic_work(done_tokens: int, prompt_tokens: int) -> int:
    """Attention and the rest, in small numbers."""
    return 3 * (prompt_tokens - done_tokens) + prompt_tokens**2 - done_tokens**2


def prompt_of(tokens: list[int], number: int, router: int = 0) -> Prompt:
    return Prompt(RequestKey(router, number), len(tokens), tuple(chain_hashes(tokens, BLOCK)))


class LoggingWorker:
    """Runs one request a step. `log` is what it says; `state` what it makes of that itself."""

    def __init__(self, number: int, work: RequestWork, cache_blocks: int, epoch: int = 0) -> None:
        self.number, self.epoch = number, epoch
        self.log: list[WorkerReport] = []
        self.queue: list[Prompt] = []
        self.state = WorkerState(work, BLOCK)
        self._cache_blocks = cache_blocks
        self.cache: OrderedDict[bytes, None] = OrderedDict()

    def append_report(self, **parts: Any) -> WorkerReport:
        report = WorkerReport(worker=self.number, epoch=self.epoch, number=len(self.log), **parts)
        self.log.append(report)
        self.state.apply(report)
        return report

    def accept(self, prompt: Prompt) -> WorkerReport:
        self.queue.append(prompt)
        return self.append_report(accepted=(prompt,))

    def start(self) -> WorkerReport:
        """The first request begins, with what the cache really holds."""
        prompt = self.queue[0]
        hits = 0
        while hits < len(prompt.hashes) and prompt.hashes[hits] in self.cache:
            hits += 1
        done_tokens = usable_tokens(prompt, hits, BLOCK)
        return self.append_report(
            progress=(PromptProgress(prompt.key, done_tokens, prompt.prompt_tokens),)
        )

    def finish(self) -> WorkerReport:
        """The first request is done, and cached as far as there is room."""
        prompt = self.queue.pop(0)
        stored = tuple(digest for digest in prompt.hashes if digest not in self.cache)
        for digest in reversed(prompt.hashes):  # so that a chain's end is evicted first
            self.cache[digest] = None
            self.cache.move_to_end(digest)
        evicted = []
        while len(self.cache) > self._cache_blocks:
            evicted.append(self.cache.popitem(last=False)[0])
        return self.append_report(stored=stored, evicted=tuple(evicted), ended=(prompt.key,))

    def cancel(self) -> WorkerReport:
        return self.append_report(ended=(self.queue.pop().key,))
