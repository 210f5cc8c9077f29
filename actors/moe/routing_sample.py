"""Sample of a rank's tokens with the experts that each used at every layer.

Every n-th token is sampled, so that the sample represents the load. A micro-batch without a sampled
token costs only `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.batching.batch_builder import Chunk
from actors.moe.backend import MicroBatchId
from contracts.clock import Clock
from contracts.planner_messages import RoutingSampleReport

PERIOD_S = 0.5  # of reports
FIRST_STRIDE = 8
MOST_UNDER_WAY = 64  # micro-batches; those of dropped batches never end

RoutingPaths = NDArray[np.int16]
MakeRouting = Callable[[], RoutingSampleReport]


@dataclass(slots=True, eq=False)
class _SampledBatch:
    """Sampled rows of a micro-batch in flight. rows: [P]; ids: [P, 2]; paths: [P, L, K]."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int32]
    paths: RoutingPaths
    layers: int = 0  # that it has passed


class RoutingSample:
    """Owned by the computing thread."""

    def __init__(
        self,
        rank: str,
        tokens_per_s: int,
        shape: tuple[int, int],
        clock: Clock,
        send: Callable[[MakeRouting], None],
    ) -> None:
        """Set up a sample. shape: layers with experts, top k. send: runs it elsewhere."""
        self._rank, self._clock, self._send = rank, clock, send
        self._most = max(1, round(tokens_per_s * PERIOD_S))  # per report
        self._shape = shape
        self._stride = FIRST_STRIDE
        self._offset = 0  # tokens until the next sampled one
        self._tokens = self._taken = 0  # since the last report
        self._reported_s = clock()
        self._under_way: dict[MicroBatchId, _SampledBatch] = {}
        self._ended: list[_SampledBatch] = []

    def prepare(self, owner: MicroBatchId, chunks: Sequence[Chunk]) -> None:
        """Select rows of a micro-batch that is about to run with these chunks."""
        now_s = self._clock()
        if now_s - self._reported_s >= PERIOD_S:
            self._report(now_s)
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        first, self._offset = self._offset, (self._offset - tokens) % self._stride
        self._tokens += tokens
        rows = range(first, tokens, self._stride)[: self._most - self._taken]
        if not rows:
            return
        self._taken += len(rows)
        paths = np.empty((len(rows), *self._shape), np.int16)
        self._under_way[owner] = _SampledBatch(np.array(rows), _ids(rows, chunks), paths)
        if len(self._under_way) > MOST_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]

    def follows(self, owner: MicroBatchId) -> bool:
        return owner in self._under_way

    def routed(self, owner: MicroBatchId, topk_ids_TK: NDArray[np.int64]) -> None:
        """Record the experts of a micro-batch at its next layer."""
        noted = self._under_way.get(owner)
        if noted is None:
            return
        noted.paths[:, noted.layers] = topk_ids_TK[noted.rows]
        noted.layers += 1
        if noted.layers == self._shape[0]:
            self._ended.append(self._under_way.pop(owner))

    def _report(self, now_s: float) -> None:
        """Send the completed samples; adapt the stride to the number of tokens."""
        per_report = self._tokens * PERIOD_S / (now_s - self._reported_s)
        self._stride = max(1, -int(-per_report // self._most))
        tokens, ended = self._tokens, self._ended
        self._reported_s, self._tokens, self._taken, self._ended = now_s, 0, 0, []
        if ended:
            self._send(lambda: _report(self._rank, tokens, ended))


def _ids(rows: Sequence[int], chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    """Return the token id of each row and the one before it (-1: none), [P, 2]."""
    found, first, ahead = [], 0, iter(chunks)
    chunk = next(ahead)
    for row in rows:
        while row >= first + chunk.stop - chunk.start:
            first += chunk.stop - chunk.start
            chunk = next(ahead)
        at, ids = chunk.start + row - first, chunk.sequence.token_ids
        found.append((ids[at], ids[at - 1] if at else -1))
    return np.array(found, np.int32)


def _report(rank: str, tokens: int, ended: Sequence[_SampledBatch]) -> RoutingSampleReport:
    """tokens: started since the last report; more may have ended."""
    ids = np.concatenate([noted.ids for noted in ended]).astype("<i4")
    paths = np.concatenate([noted.paths for noted in ended]).astype("<i2")
    tokens = max(tokens, len(ids))
    return RoutingSampleReport(rank=rank, tokens=tokens, ids=ids.tobytes(), paths=paths.tobytes())
