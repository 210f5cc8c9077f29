"""The state of a worker from its log: equal on all routers and on the worker itself.

    log        report 0, report 1, …        (contracts/routing_messages.py)
    committed  hashes of blocks in its prefix cache
    pending    hashes that its open requests will fill
    load       work of its open requests

A state is a fold over the log alone, so routers agree on it regardless of the order in which
reports of different workers arrive.

The saturation threshold tau is the work that hides a worker's transfer of expert weights
(MoE-Prefill, Section 6.2 and Appendix B.4; docs/notation.md describes the reconstruction of the
equations).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from contracts.config import PrefillConfig
from contracts.routing_messages import (
    Calibration,
    OpenRequest,
    Prompt,
    WorkerReport,
    WorkerSnapshot,
)
from planner.routing.open_requests import OpenRequests, RequestWork
from planner.routing.prefix_index import PendingBlocks, leading_blocks

_SELF = 0  # the only worker of `_pending`


class MissingReportsError(Exception):
    """A report arrived before one that it builds on: request a snapshot from the worker."""


class WorkerState:
    """One worker as described by its reports."""

    def __init__(self, work: RequestWork, block_tokens: int) -> None:
        self.present = True
        self._work = work
        self._block_tokens = block_tokens
        self._closed_epoch = -1  # reports of this and older epochs are ignored
        self._clear(-1)

    def _clear(self, epoch: int) -> None:
        self.epoch, self.number = epoch, -1
        self.calibration: Calibration | None = None
        self.requests = OpenRequests(self._work)
        self._pending = PendingBlocks()
        self._committed: dict[bytes, None] = {}  # ordered, so that copies are equal

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return the leading blocks that are committed or pending."""
        committed = leading_blocks(hashes, self._committed.__contains__)
        return max(committed, self._pending.match(_SELF, hashes))

    def apply(self, report: WorkerReport) -> list[Prompt] | None:
        """Fold the next report and return the prompts that ended.

        Returns None for a known report. Raises MissingReportsError for a gap, without a change, and
        ValueError for a report that contradicts the log; such a worker must be dropped with `lose`.
        """
        if self._is_old(report.epoch, report.number):
            return None
        if self.number == -1 and report.number == 0:
            self.epoch = report.epoch
        if (report.epoch, report.number) != (self.epoch, self.number + 1):
            raise MissingReportsError(
                f"worker {report.worker}: report {report.epoch}.{report.number} follows "
                f"{self.epoch}.{self.number}: restore a snapshot"
            )
        self.present = True
        self.number = report.number
        if report.calibration is not None:
            self.calibration = report.calibration
        for prompt in report.accepted:
            blocks = self.match(prompt.hashes)
            self._add(OpenRequest(prompt, usable_tokens(prompt, blocks, self._block_tokens), False))
        for progress in report.progress:
            self.requests.advance(progress.key, progress.done_tokens, progress.until_tokens)
        self._committed.update(dict.fromkeys(report.stored))
        for digest in report.evicted:
            self._committed.pop(digest, None)
        ended = [self.requests.close(key) for key in report.ended]
        for prompt in ended:
            self._pending.remove(_SELF, prompt.hashes)
        return ended

    def _is_old(self, epoch: int, number: int) -> bool:
        return epoch <= self._closed_epoch or (epoch, number) <= (self.epoch, self.number)

    def _add(self, request: OpenRequest) -> None:
        self.requests.add(request)
        self._pending.add(_SELF, request.prompt.hashes)

    def lose(self) -> None:
        """Mark the worker as dead, until report 0 or a snapshot of a later epoch."""
        self._closed_epoch = max(self._closed_epoch, self.epoch)
        self.forget()

    def forget(self) -> None:
        """Mark the worker as unreachable, until a snapshot of an epoch that is not closed."""
        self._clear(-1)
        self.present = False

    def snapshot(self, worker: int) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker=worker,
            epoch=self.epoch,
            number=self.number,
            calibration=self.calibration,
            committed=tuple(self._committed),
            requests=tuple(self.requests.entries()),
        )

    def restore(self, snapshot: WorkerSnapshot) -> bool:
        """Replace the log up to the snapshot; return False if that is known already."""
        if self._is_old(snapshot.epoch, snapshot.number):
            return False
        self._clear(snapshot.epoch)
        self.present = True
        self.number, self.calibration = snapshot.number, snapshot.calibration
        self._committed = dict.fromkeys(snapshot.committed)
        for request in snapshot.requests:
            self._add(request)
        return True


def usable_tokens(prompt: Prompt, blocks: int, block_tokens: int) -> int:
    """Return the tokens that `blocks` matched blocks save; the last token is always computed."""
    return min(blocks, (prompt.prompt_tokens - 1) // block_tokens) * block_tokens


MARGIN_FRACTION = 0.1  # the paper's gamma: jitter of transfers
REFERENCE_PROMPT_TOKENS = 512


class SaturationConfig(NamedTuple):
    """Configuration of the threshold.

    pinned: a fixed threshold that replaces calibration. fallback_prompts: the reference batch that
    is assumed without a calibration.
    """

    fallback_prompts: tuple[int, ...]
    margin_fraction: float = MARGIN_FRACTION
    pinned: int | None = None


def saturation_of(prefill: PrefillConfig, context_tokens: int) -> SaturationConfig:
    """Return the configuration, which is equal on the router and its workers."""
    return SaturationConfig(
        fallback_prompts=reference_prompts(prefill.max_batch_tokens, context_tokens),
        margin_fraction=prefill.saturation_margin,
        pinned=prefill.saturation,
    )


def reference_prompts(max_tokens: int, context_tokens: int) -> tuple[int, ...]:
    """Return the prompt lengths of a reference batch of `max_tokens`."""
    length = min(max_tokens, context_tokens, REFERENCE_PROMPT_TOKENS)
    whole, rest = divmod(max_tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def threshold(config: SaturationConfig, work: RequestWork, calibration: Calibration | None) -> int:
    """Return the threshold: pinned, or (1 + gamma) * t_max / t_0 * F_ref (Eq. 3).

    t_max / t_0: of a reference pass, 1 without any. F_ref uses the router's own `work`, so
    threshold and load have one unit.
    """
    if config.pinned is not None:
        return config.pinned
    stretch, prompts = 1.0, config.fallback_prompts
    if calibration is not None:
        stretch = calibration.slowest_layer_s / calibration.first_layer_s
        prompts = calibration.reference_prompts
    reference = sum(work(0, tokens) for tokens in prompts)
    return max(1, math.ceil((1 + config.margin_fraction) * stretch * reference))
