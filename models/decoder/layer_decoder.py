"""Layers of a decode batch with resident experts, in one compiled call.

Shapes: L layers, T rows, D model dim, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention_ops import BATCH_FIELDS, CLOCK_FIELDS, decode_layers
from kernels.compiled import bits_of
from kernels.experts import RUN_PAIRS, expert_fields
from kernels.thread_pool import shared_pool
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.experts.expert_loading import ExpertLayer


class LayerDecoder:
    """Runs layers of batches that it `accepts`, all experts of which are resident."""

    def __init__(
        self, half: AttentionHalf, experts: Sequence[ExpertLayer], local_of_E: Tensor, kv: KvPool
    ) -> None:
        """Set up tables with a row for each layer, which `supports` its call."""
        spec, dtype, L = half.spec, half.dtype, half.spec.num_layers
        self._half, self._kept = half, (experts, local_of_E, kv)
        self._most_rows = RUN_PAIRS // spec.top_k
        shape = self._most_rows, spec.top_k
        self._x_TD = torch.empty((self._most_rows, spec.hidden_size), dtype=dtype)
        self._ids_TK, self._weights_TK = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        results = [tensor.data_ptr() for tensor in (self._x_TD, self._ids_TK, self._weights_TK)]
        numbers = dtype is torch.float32
        table = half.decode_table()
        assert table is not None
        self._layers = table
        self._batches = np.zeros((L, BATCH_FIELDS), np.int64)
        self._batches[:, 6:8] = [[each.data_ptr() for each in kv.entries(n)] for n in range(L)]
        self._batches[:, 8:] = *results, numbers, bits_of(spec.head_dim**-0.5)
        self._experts = np.stack(
            [expert_fields(each.gate_up, each.down, each.clamped) for each in experts]
        )
        self._experts[:, 9:14] = spec.top_k, *results, local_of_E.data_ptr()
        self._experts[:, 15] = numbers
        self._clock = np.zeros((L, CLOCK_FIELDS), np.int64)

    @staticmethod
    def supports(half: AttentionHalf, experts: Sequence[ExpertLayer]) -> bool:
        """Return whether the call has all steps of a decoder's layers."""
        kinds = [(each.gate_up.kind, each.down.kind) for each in experts]
        are_compiled = all(one is not None and one == other for one, other in kinds)
        return are_compiled and half.decode_table() is not None

    def accepts(self, batch: AttentionBatch) -> bool:
        """Return whether a batch has few sequences, with one new token each."""
        return batch.num_tokens <= self._most_rows and self._half.decodes_at_once(batch)

    def run(
        self, first: int, last: int, hidden_TD: Tensor, batch: AttentionBatch
    ) -> list[tuple[float, float]]:
        """Run layers [first, last) on hidden_TD in place.

        Returns the monotonic clock's seconds at the end of each one's attention and experts.
        """
        metadata = self._half.prepare(batch)
        T, hidden = len(hidden_TD), hidden_TD.data_ptr()
        tensors = hidden_TD, metadata.cos, metadata.sin, batch.slots_T
        self._batches[:, :5] = T, *(tensor.data_ptr() for tensor in tensors)
        self._batches[:, 5] = self._half.entries(batch)
        self._experts[:, 8], self._experts[:, 14] = T, hidden
        tables = self._layers, self._batches, self._experts, self._clock
        layers, batches, experts, clock = (table.ctypes.data for table in tables)
        decode_layers(shared_pool(), layers, batches, experts, clock, first, last)
        seconds = self._clock[first:last, ::2] + self._clock[first:last, 1::2] * 1e-9
        return [(attention_s, experts_s) for attention_s, experts_s in seconds.tolist()]
