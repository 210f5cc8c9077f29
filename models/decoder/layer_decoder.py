"""Layers of a decode batch in one compiled call.

Shapes: L layers, T rows, D model dim, K top-k.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contracts.traces import Stage
from kernels.compiled import bits_of
from kernels.experts import RUN_PAIRS, expert_fields
from kernels.layer_ops import BATCH_FIELDS, CLOCK_FIELDS, EXPERT_FIELDS, decode_layers
from kernels.thread_pool import shared_pool
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import RoutedTokens
from models.experts.expert_loading import ExpertLayer
from models.spec.layer_spec import RopeSpec
from models.spec.model import ModelSpec


class CallOwner(NamedTuple):
    """The micro-batch of a call."""

    batch: int
    micro_batch: int
    priority: int


LayerEnds = Sequence[Sequence[tuple[Stage, float]]]
"""Stages of each complete layer, and the monotonic clock's seconds at their ends."""


class DecodedLayers(NamedTuple):
    """Result of a call.

    routed: of the layer that follows, if its attention is complete and the call cannot compute its
    experts.
    """

    ends: LayerEnds
    routed: RoutedTokens | None = None


def most_rows(spec: ModelSpec) -> int:
    """Return the number of rows that a call is made for."""
    return RUN_PAIRS // spec.top_k


class LayerDecoder(abc.ABC):
    """Tables of a call with a row for each layer, and room for its results.

    uses_loop: True if other batches could run while a call waits for another process. waits: True
    if the last call ended before the experts of the layer that it had reached.
    """

    uses_loop = waits = False
    stages: ClassVar[tuple[Stage, ...]]  # whose ends the call writes
    _clock: NDArray[np.int64]  # [L, stages], ns

    def __init__(self, half: AttentionHalf, kv: KvPool) -> None:
        """Set up tables; `half.decode_table` must have rows."""
        spec, dtype, L = half.spec, half.dtype, half.spec.num_layers
        table = half.decode_table()
        assert table is not None
        self._half, self._kv, self._layers = half, kv, table
        self._columns = list(map(self._columns_of, range(L)))
        self._stop = np.zeros(1, np.int64)
        self._most_rows = most_rows(spec)
        self._layers_of: dict[tuple[RopeSpec | None, int | None], list[int]] = {}
        for layer, window in enumerate(spec.sliding_windows):
            self._layers_of.setdefault((spec.rope_of(layer), window), []).append(layer)
        self._x_TD = torch.empty((self._most_rows, spec.hidden_size), dtype=dtype)
        self._ids_LTK = torch.empty((L, self._most_rows, spec.top_k), dtype=torch.int64)
        self._weights_TK = torch.empty((self._most_rows, spec.top_k))
        self._mlp_TD = torch.empty_like(self._x_TD)
        self._batches = np.zeros((L, BATCH_FIELDS), np.int64)
        self._batches[:, 6:8] = [[each.data_ptr() for each in kv.entries(n)] for n in range(L)]
        self._batches[:, 8] = self._x_TD.data_ptr()
        self._batches[:, 9] = [ids_TK.data_ptr() for ids_TK in self._ids_LTK]
        self._batches[:, 10] = self._weights_TK.data_ptr()
        self._batches[:, 11:13] = dtype is torch.float32, bits_of(spec.softmax_scale)
        self._weighed_TD = torch.empty_like(self._x_TD)
        self._batches[:, 13:15] = self._mlp_TD.data_ptr(), self._weighed_TD.data_ptr()
        self._sum_TD = torch.empty_like(self._x_TD)
        self._batches[:, 16] = self._sum_TD.data_ptr()
        self._experts_TD = self._weighed_TD if spec.family.weighs_input else self._x_TD

    def accepts(self, batch: AttentionBatch) -> bool:
        """Return whether a batch has few sequences, with one new token each."""
        return batch.num_tokens <= self._most_rows and self._half.decodes_at_once(batch)

    @abc.abstractmethod
    def run(
        self,
        layers: tuple[int, int],
        hidden_TD: Tensor,
        batch: AttentionBatch,
        owner: CallOwner,
        *,
        is_alone: bool,
    ) -> DecodedLayers:
        """Run layers [first, last) of an accepted batch on hidden_TD in place.

        is_alone: no other batch needs the loop. After `interrupt` it ends with a layer.
        """

    def interrupt(self) -> None:
        """End a call, or the next one, after a layer. Thread-safe."""
        self._stop[0] = 1

    def end(self) -> None:  # noqa: B027 - most calls do not wait
        """End a call that is complete, or whose batch was dropped while it waited."""

    def _fill(self, hidden_TD: Tensor, batch: AttentionBatch) -> None:
        metadata = self._half.prepare(batch)
        rows, slots = (batch.num_tokens, hidden_TD.data_ptr()), batch.slots_T.data_ptr()
        for (rope, window), layers in self._layers_of.items():
            cos, sin = metadata.angles[rope]
            entries = metadata.plans[window].rows
            assert entries is not None
            address = entries.table.ctypes.data
            self._batches[layers, :6] = *rows, cos.data_ptr(), sin.data_ptr(), slots, address
            self._batches[layers, 15] = metadata.query_factors(rope)

    def _columns_of(self, layer: int) -> list[tuple[Stage, int]]:
        """Return the stages of a layer, and the columns of the clock with their ends."""
        if not self._half.spec.is_moe(layer):
            return [(Stage.ATTENTION, -1)]
        stages = {stage: column for column, stage in enumerate(self.stages)}
        if not self._half.has_shared(layer):
            del stages[Stage.SHARED]
        return list(stages.items())

    def _stage_ends(self, first: int, last: int) -> LayerEnds:
        ends_LS = (self._clock[first:last] * 1e-9).tolist()
        return [
            [(stage, ends_s[column]) for stage, column in columns]
            for columns, ends_s in zip(self._columns[first:last], ends_LS, strict=True)
        ]


class ResidentLayerDecoder(LayerDecoder):
    """Runs layers whose experts are all resident in this process."""

    stages = Stage.ATTENTION, Stage.SHARED, Stage.EXPERT

    def __init__(
        self,
        half: AttentionHalf,
        experts: Mapping[int, ExpertLayer],
        local_of_E: Tensor,
        kv: KvPool,
    ) -> None:
        """Set up tables; `supports` must be true. experts: of each layer that has any."""
        super().__init__(half, kv)
        self._kept = experts, local_of_E
        self._experts = np.zeros((len(self._layers), EXPERT_FIELDS), np.int64)
        for layer, each in experts.items():
            self._experts[layer] = expert_fields(each.gate_up, each.down, each.clamped)
        self._experts[:, 9], self._experts[:, 13] = half.spec.top_k, local_of_E.data_ptr()
        self._experts[:, 10] = self._experts_TD.data_ptr()
        self._experts[:, 11:13] = self._batches[:, 9:11]
        self._clock = np.zeros((len(self._layers), CLOCK_FIELDS), np.int64)

    @staticmethod
    def supports(half: AttentionHalf, experts: Mapping[int, ExpertLayer]) -> bool:
        """Return whether the call has all steps of a decoder's layers."""
        kinds = [(each.gate_up.kind, each.down.kind) for each in experts.values()]
        are_compiled = all(one is not None and one == other for one, other in kinds)
        return are_compiled and half.decode_table() is not None

    def run(
        self,
        layers: tuple[int, int],
        hidden_TD: Tensor,
        batch: AttentionBatch,
        owner: CallOwner,
        *,
        is_alone: bool,
    ) -> DecodedLayers:
        self._fill(hidden_TD, batch)
        self._experts[:, 8] = len(hidden_TD)
        tables = self._layers, self._batches, self._experts, self._clock, self._stop
        table, batches, experts, clock, stop = (each.ctypes.data for each in tables)
        reached = decode_layers(shared_pool(), table, batches, experts, clock, stop, *layers)
        self._stop[0] = 0
        return DecodedLayers(self._stage_ends(layers[0], reached))
