"""CUDA graphs of the attention half of batches in decode, one for each layer and size.

A graph reads and writes tensors that stay where they are. A batch's numbers and residual are copied
there before a replay, and its results are copied out after it, so micro-batches share graphs. Rows
beyond those of the batch repeat its first row: they write the same K and V to the same slot.

A graph ends at the router. Placements of experts do not concern it; if the pool has moved, it is
captured again.

Shapes: B sequences, T >= B rows of a size, W blocks of its longest context, D model dim, K top-k.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contracts.errors import ConfigError
from contracts.logs import event
from kernels.attention import AttentionPlan
from kernels.device import upload
from kernels.paged_attention import attention_kernels
from kernels.pages import TILE_COLUMNS, PagedPart, PagedPlan, Pages, Seen, next_power_of_2, tiles_of
from kernels.steps import run_to_end
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, AttentionMetadata
from models.decoder.decoder import AttentionHalf, AttentionOutput
from models.experts.expert_half import RoutedTokens

log = logging.getLogger(f"tandem.{__name__}")

_MOST_ROWS = 256
_LEAST_BLOCKS = 32


Run = Callable[[], None]


class CudaRecorder:
    """Captures graphs that share memory for what they make on the way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        """Run once, then capture; return a function that replays it on the same tensors."""
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and selects algorithms, which a capture must not
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


class _Captured(NamedTuple):
    """pool: addresses of the layer's entries."""

    pool: tuple[int, ...]
    replay: Run


class _Size(NamedTuple):
    rows: int
    blocks: int


class DecodeGraphs:
    """Graphs for one half and one pool. record: as of `CudaRecorder`."""

    def __init__(self, half: AttentionHalf, kv: KvPool, record: Callable[[Run], Run]) -> None:
        self._half, self._kv, self._record = half, kv, record
        self._tensors: dict[_Size, _StaticTensors] = {}

    @staticmethod
    def of(half: AttentionHalf, kv: KvPool, setting: bool | None) -> DecodeGraphs | None:
        """Return graphs by `schedule.cuda_graphs`. Raises ConfigError if true is impossible."""
        if setting is False:
            return None
        reason = _refusal(half)
        if not reason:
            return DecodeGraphs(half, kv, CudaRecorder(half.device).record)
        if setting:
            raise ConfigError(f"schedule.cuda_graphs=true: {reason}: leave it out")
        if half.device.type == "cuda":
            event(log, "cuda_graphs_off", logging.WARNING, reason=reason)
        return None

    def accepts(self, batch: AttentionBatch) -> bool:
        """Return whether each sequence of a batch has one new token, and blocks of its own."""
        is_decode = all(seq.count == 1 for seq in batch.sequences)
        return is_decode and 0 < batch.num_tokens <= _MOST_ROWS and batch.copies is None

    def attend(self, layer: int, hidden_TD: Tensor, batch: AttentionBatch) -> AttentionOutput:
        """Do what `AttentionHalf.attend` does, for an accepted batch."""
        tensors, pool = self._tensors_for(batch), self._kv.entries(layer)
        tensors.fill(batch, self._half.prepare(batch))
        addresses = tuple(each.data_ptr() for each in pool)
        captured = tensors.captured.get(layer)
        if captured is None or captured.pool != addresses:
            tensors.take(hidden_TD)
            run = functools.partial(self._run, layer, tensors)
            captured = _Captured(addresses, self._record(run))
            tensors.captured[layer] = captured
        tensors.take(hidden_TD)
        captured.replay()
        B = len(hidden_TD)
        hidden_TD.copy_(tensors.hidden_TD[:B])
        routed = tensors.routed.get(layer)
        if routed is None:
            return AttentionOutput(hidden_TD, None)
        x_TD, ids_TK, weights_TK, *plain = (each[:B].clone() for each in routed)
        return AttentionOutput(hidden_TD, RoutedTokens(x_TD, ids_TK, weights_TK, *plain))

    def _tensors_for(self, batch: AttentionBatch) -> _StaticTensors:
        longest = max(seq.context for seq in batch.sequences)
        blocks = -(-longest // self._kv.block_tokens)
        size = _Size(next_power_of_2(batch.num_tokens), max(_LEAST_BLOCKS, next_power_of_2(blocks)))
        if size not in self._tensors:
            self._tensors[size] = _StaticTensors(self._half, size, self._kv.block_tokens)
        return self._tensors[size]

    def _run(self, layer: int, tensors: _StaticTensors) -> None:
        """Run a layer on static tensors only."""
        steps = self._half.steps(layer, tensors.hidden_TD, tensors.batch, self._kv)
        tensors.keep(layer, run_to_end(steps).routed)


def _refusal(half: AttentionHalf) -> str:
    """Return why a half cannot be captured, or an empty string."""
    if half.joins_later:
        return f"{half.spec.architecture} norms the experts' output in the next layer"
    if half.device.type != "cuda":
        return f"not with groups.device={half.device.type}"
    if attention_kernels(half.embedding_VD) is None:
        return "it needs triton, gcc and model.dtype=bfloat16"
    return ""


class _StaticTensors:
    """Tensors that the graphs of a size read and write.

    routed: outputs of each layer with experts; layers share them.
    """

    def __init__(self, half: AttentionHalf, size: _Size, block_tokens: int) -> None:
        self._half, self._size = half, size
        self._owner: AttentionBatch | None = None
        (T, W), device, windows = size, half.device, half.seen_keys
        parts = [T, T, T, T * W // 2] + [-(-T * TILE_COLUMNS // 2)] * len(windows)
        self._numbers = torch.zeros(sum(parts), dtype=torch.int64, device=device)
        self._rows_T, positions_T, slots_T, tables, *tiles = torch.split(self._numbers, parts)
        pages = Pages(tables.view(torch.int32).view(T, W), block_tokens)
        self._plans = {
            window: _plan(part.view(torch.int32)[: T * TILE_COLUMNS], pages, seen, size)
            for (window, seen), part in zip(windows.items(), tiles, strict=True)
        }
        self.hidden_TD = torch.zeros((T, half.spec.hidden_size), dtype=half.dtype, device=device)
        self.batch = AttentionBatch(positions_T, positions_T, slots_T, ())
        self.captured: dict[int, _Captured] = {}
        self.routed: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: tuple[Tensor, ...] = ()

    def fill(self, batch: AttentionBatch, metadata: AttentionMetadata) -> None:
        """Copy a batch's numbers, unless they are still here."""
        if self._owner is batch:
            return
        self._owner = batch
        self._numbers.copy_(upload([self._host_numbers(batch)], self._half.device)[0])
        if self.batch.metadata is None:
            self.batch.metadata = AttentionMetadata(
                {
                    rope: (self._zeros(cos), self._zeros(sin))
                    for rope, (cos, sin) in metadata.angles.items()
                },
                self._plans,
                None if metadata.query_scale_T11 is None else self._zeros(metadata.query_scale_T11),
            )
        own = self.batch.metadata
        pairs = [(metadata.angles[rope], own.angles[rope]) for rope in own.angles]
        copies = [both for pair in pairs for both in zip(*pair, strict=True)]
        if metadata.query_scale_T11 is not None and own.query_scale_T11 is not None:
            copies.append((metadata.query_scale_T11, own.query_scale_T11))
        for each, into in copies:
            torch.index_select(each, 0, self._rows_T, out=into)

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros((self._size.rows, *like.shape[1:]))

    def take(self, hidden_TD: Tensor) -> None:
        """Copy a residual."""
        torch.index_select(hidden_TD, 0, self._rows_T, out=self.hidden_TD)

    def keep(self, layer: int, routed: RoutedTokens | None) -> None:
        """Copy a layer's outputs to where they stay."""
        if routed is None:
            return
        found = [routed.x_TD, routed.topk_ids_TK, routed.topk_weights_TK]
        if routed.plain_TD is not None:
            found.append(routed.plain_TD)
        if not self._outputs:  # in the run before the first capture
            self._outputs = tuple(map(torch.empty_like, found))
        for each, into in zip(found, self._outputs, strict=True):
            into.copy_(each)
        self.routed[layer] = self._outputs

    def _host_numbers(self, batch: AttentionBatch) -> NDArray[np.int64]:
        """Return the numbers in the order of `_numbers`."""
        (T, W), B, host = self._size, batch.num_tokens, batch.host
        assert host is not None
        rows_T = np.where(np.arange(T) < B, np.arange(T), 0)
        tables_TW = np.zeros((T, W), np.int32)
        width = min(W, host.tables_BW.shape[1])
        tables_TW[:B, :width] = host.tables_BW[:, :width]
        arrays = [rows_T, host.positions_T[rows_T], host.slots_T[rows_T]]
        arrays.append(tables_TW.reshape(-1).view(np.int64))
        for seen in self._half.seen_keys.values():
            tiles_N = np.zeros(-(-T * TILE_COLUMNS // 2) * 2, np.int32)
            tiles, _, _ = tiles_of(list(enumerate(batch.sequences)), 1, 0, seen)
            tiles_N[: tiles.size] = tiles.reshape(-1)
            tiles_N[B * TILE_COLUMNS + TILE_COLUMNS - 1 :: TILE_COLUMNS] = -1
            arrays.append(tiles_N.view(np.int64))
        return np.concatenate(arrays)


def _plan(tiles: Tensor, pages: Pages, seen: Seen, size: _Size) -> AttentionPlan:
    """Return a plan of one tile for each row, whose splits depend on the size only."""
    keys = size.blocks * pages.block_tokens
    longest = -(-min(keys, seen.window or keys) // seen.split_keys)
    part = PagedPart(
        tiles=tiles.view(size.rows, TILE_COLUMNS),
        host_tiles=np.zeros((0, TILE_COLUMNS), np.int32),
        pages=pages,
        seen=seen,
        tile_rows=1,
        longest=longest,
        splits=size.rows * longest if longest > 1 else 0,
    )
    return AttentionPlan(paged=PagedPlan((part,), 0, size.rows))
