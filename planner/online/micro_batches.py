"""What an attention rank does for a micro-batch beside its attention, as measured: it finishes each
of its sequences once (logits, sampling), and sends each layer's tokens to expert ranks."""

from __future__ import annotations

from contracts.planning import MicroBatchTimes
from planner.costs.stages import Linear
from planner.findep.batch_plan import ChunkTime
from planner.online.sized_stage import SizedStage

_TYPICAL_SEQUENCES, _TYPICAL_TOKENS = 8.0, 64.0
_BOTH_WAYS = 2.0  # an answer is added up for each packet that is cut out
_FREE = Linear(0.0, 0.0)


class MicroBatchStage:
    """Nothing of it while there are few times yet."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._finish = SizedStage(None, _TYPICAL_SEQUENCES)
        self._send = SizedStage(None, _TYPICAL_TOKENS)

    def carry_over(self, before: MicroBatchStage) -> None:
        """From a group of another size: what ends a sequence is a rank's own."""
        self._finish = before._finish

    def add(self, times: MicroBatchTimes) -> None:
        if times.finish_ms > 0:
            self._finish.add(len(times.batch), times.finish_ms)
        if times.send_ms > 0:
            self._send.add(sum(stop - start for start, stop in times.batch), times.send_ms)

    def launch_ms(self, more: float) -> float:
        """Of a micro-batch, in each layer. more: further expert ranks, as a part of those that the
        times are of."""
        finish, send = self._finish.model or _FREE, self._send.model or _FREE
        return finish.alpha_ms / self._layers + max(0.0, more) * _BOTH_WAYS * send.alpha_ms

    def chunk_time(self, chunk_ms: ChunkTime, more: float) -> ChunkTime:
        """With what a sequence adds here."""
        finish, send = self._finish.model or _FREE, self._send.model or _FREE
        sequence_ms = finish.beta_ms / self._layers
        token_ms = max(0.0, more) * _BOTH_WAYS * send.beta_ms
        return lambda start, stop: chunk_ms(start, stop) + sequence_ms + token_ms * (stop - start)
