"""Causal attention on a device that reads K and V where they are in the pool (kernels/pages.py).

Triton's kernels compute it (kernels/triton_attention.py), else torch's operations, split by split.

Shapes: T new tokens, H query heads, G KV heads, R = H / G, d head dim, v of a value, P pool slots,
S splits, K keys of a split, N = T * R.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from kernels.attention_ops import SequenceRows
from kernels.device import upload
from kernels.flashinfer_kernels import kind_of
from kernels.fused_ops import fused_kernels, import_checked
from kernels.pages import PagedPart, Pages, Seen, plan_paged

_REFERENCE_ROWS = 128  # of a prompt, in torch's operations


def attend_paged(
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PagedPart,
    out_THv: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> None:
    """Write the tiles' rows of `out`, whose head dim may be less: then of v's first elements.

    A row of q is contiguous.
    """
    library = library_attention(q_THd, kind_of(q_THd, out_THv.shape[2], sinks_H))
    if library is not None and library.supports(q_THd, out_THv.shape[2], part):
        library.attend(q_THd, k_pool_PGd, v_pool_PGd, part, out_THv, scale, sinks_H)
        return
    own = attention_kernels(q_THd)
    if own is None:
        _attend_by_torch(q_THd, k_pool_PGd, v_pool_PGd, part, out_THv, scale, sinks_H)
        return
    _attend_by_triton(own, q_THd, k_pool_PGd, v_pool_PGd, part, out_THv, scale, sinks_H)


def _attend_by_triton(
    own: ModuleType,
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PagedPart,
    out_THv: Tensor,
    scale: float,
    sinks_H: Tensor | None,
) -> None:
    S, H, v = max(1, part.splits), out_THv.shape[1], out_THv.shape[2]
    sums_SHv = torch.empty((S, H, v), dtype=torch.float32, device=q_THd.device)
    stats_SH2 = torch.empty((S, H, 2), dtype=torch.float32, device=q_THd.device)
    partial = sums_SHv, stats_SH2
    own.attend(q_THd, k_pool_PGd, v_pool_PGd, part, out_THv, scale, sinks_H, partial)
    if part.splits:
        own.combine(part, out_THv, sinks_H, partial)


def _attend_by_torch(
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PagedPart,
    out_THv: Tensor,
    scale: float,
    sinks_H: Tensor | None,
) -> None:
    G, (_, H, v) = k_pool_PGd.shape[1], out_THv.shape
    for first, count, start, table, _ in _joined(part):
        rows, low = slice(first, first + count), part.seen.lowest(start)
        q_GNd = q_THd[rows].view(count, G, H // G, -1).transpose(0, 1).flatten(1, 2).float()
        state = _Sum(q_GNd.new_zeros(*q_GNd.shape[:2], v), sinks_H)
        for begin in range(low, start + count, part.seen.split_keys):
            end = min(begin + part.seen.split_keys, start + count)
            slots_K = _slots(part.pages, table, begin, end)
            k_GKd, v_GKd = (
                pool.index_select(0, slots_K).transpose(0, 1).float()
                for pool in (k_pool_PGd, v_pool_PGd)
            )
            scores_GNK = torch.bmm(q_GNd, k_GKd.transpose(1, 2)).mul_(scale)
            hidden_TK = _hidden(start, count, (begin, end), part.seen, q_THd.device)
            scores_GTRK = scores_GNK.view(G, count, H // G, -1)
            if hidden_TK is not None:
                scores_GTRK.masked_fill_(hidden_TK[:, None], float("-inf"))
            state.add(scores_GNK, v_GKd[..., :v])
        attended_GNv = state.result(count)
        out_THv[rows] = attended_GNv.view(G, count, H // G, v).transpose(0, 1).flatten(1, 2)


def _joined(part: PagedPart) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield tiles that are joined to longer ones."""
    last: tuple[int, int, int, int, int] | None = None
    for tile in part.host_tiles.tolist():
        first, count, start, table, place = tile
        if last is not None and last[3] == table and last[1] + count <= _REFERENCE_ROWS:
            last = (last[0], last[1] + count, *last[2:])
            continue
        if last is not None:
            yield last
        last = first, count, start, table, place
    if last is not None:
        yield last


def _slots(pages: Pages, table: int, begin: int, end: int) -> Tensor:
    positions_K = torch.arange(begin, end, device=pages.blocks_BW.device)
    blocks_K = pages.blocks_BW[table].index_select(0, positions_K // pages.block_tokens)
    return blocks_K.long() * pages.block_tokens + positions_K % pages.block_tokens


def _hidden(
    start: int, count: int, keys: tuple[int, int], seen: Seen, device: torch.device
) -> Tensor | None:
    """Return which of the keys each row does not see; None: it sees all."""
    if keys[1] <= start + 1 and (not seen.window or keys[0] >= seen.lowest(start + count - 1)):
        return None
    rows_T1 = torch.arange(start, start + count, device=device).unsqueeze(1)
    keys_K = torch.arange(*keys, device=device)
    hidden_TK = keys_K > rows_T1
    if seen.window:
        low_T1 = rows_T1 - (rows_T1 % seen.window if seen.chunked else seen.window - 1)
        hidden_TK |= keys_K < low_T1
    return hidden_TK


class _Sum:
    """Weighted sums of values [G, N, v] over splits, float32. sinks_H: scores without a value."""

    def __init__(self, sums_GNv: Tensor, sinks_H: Tensor | None) -> None:
        self._sums, self._sinks_H = sums_GNv, sinks_H
        self._largest = torch.full_like(sums_GNv[..., :1], float("-inf"))
        self._total = torch.zeros_like(self._largest)

    def add(self, scores_GNK: Tensor, v_GKv: Tensor) -> None:
        largest = torch.maximum(scores_GNK.amax(-1, keepdim=True), self._largest)
        base = largest.clamp(min=torch.finfo(largest.dtype).min)  # rows that see no key so far
        probs_GNK = scores_GNK.sub_(base).exp_()
        kept = (self._largest - base).exp_()
        self._total = self._total * kept + probs_GNK.sum(-1, keepdim=True)
        self._sums = self._sums.mul_(kept) + torch.bmm(probs_GNK, v_GKv)
        self._largest = largest

    def result(self, count: int) -> Tensor:
        """Return the attention of `count` rows with R heads each."""
        if self._sinks_H is None:
            return self._sums / self._total
        G = len(self._sums)
        sinks_GN1 = self._sinks_H.float().view(G, 1, -1, 1).expand(G, count, -1, 1).flatten(1, 2)
        largest = torch.maximum(self._largest, sinks_GN1)
        kept = (self._largest - largest).exp_()
        return self._sums * kept / (self._total * kept + (sinks_GN1 - largest).exp_())


def library_attention(x: Tensor, kind: str) -> ModuleType | None:
    """Return kernels/flashinfer_kernels.py if FlashInfer has `kind` here, or None."""
    is_installed = importlib.util.find_spec("flashinfer") is not None
    return _library_attention(kind) if is_installed and fused_kernels(x) is not None else None


@functools.cache
def _library_attention(kind: str) -> ModuleType | None:
    def check(library: ModuleType) -> None:
        _compare(library.attend, kind, torch.device("cuda"))

    return import_checked("kernels.flashinfer_kernels", check)


def attention_kernels(x: Tensor) -> ModuleType | None:
    """Return kernels/triton_attention.py if it supports tensors such as `x`, or None."""
    return None if fused_kernels(x) is None else _attention_kernels()


@functools.cache
def _attention_kernels() -> ModuleType | None:
    return import_checked("kernels.triton_attention", _check)


def _check(kernels: ModuleType) -> None:
    for kind in ("plain", "sinks", "latent"):
        _compare(functools.partial(_attend_by_triton, kernels), kind, torch.device("cuda"))


def _compare(attend: Callable[..., None], kind: str, device: torch.device) -> None:
    """Raise AssertionError if a result differs from that of torch's operations."""
    G, d, v, blocks = (1, 576, 512, 80) if kind == "latent" else (2, 64, 64, 80)
    k_PGd, v_PGd, q_THd = (
        torch.randn(rows, heads, d, device=device).bfloat16()
        for rows, heads in ((16 * blocks, G), (16 * blocks, G), (6, 4 * G))
    )
    v_PGd = k_PGd if kind == "latent" else v_PGd
    order = torch.randperm(blocks, device=device).int()
    pages = Pages(torch.stack((order, order.flip(0))), 16)
    rows = SequenceRows(0, 1, 1200), SequenceRows(1, 5, 40)
    sinks_H = q_THd[0, :, 0].contiguous() if kind == "sinks" else None
    for seen in (Seen(),) if kind == "latent" else (Seen(), Seen(window=33), Seen(window=600)):
        found, expected = (q_THd.new_zeros(6, 4 * G, v) for _ in range(2))
        for part in plan_paged(list(enumerate(rows)), pages, seen, 4, device).parts:
            attend(q_THd, k_PGd, v_PGd, part, found, 0.1, sinks_H)
            _attend_by_torch(q_THd, k_PGd, v_PGd, part, expected, 0.1, sinks_H)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


# --- prompts without earlier context

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_STEP, _FLASH_LARGEST = 8, 256  # head dims


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPart:
    """ends int32 [B + 1]: bounds of each sequence's rows.

    window W: position p sees p-W+1 .. p.
    """

    ends: Tensor
    longest: int
    window: int | None


def supports_packed(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Return whether torch has the kernel."""
    fits = head_dim % _FLASH_STEP == 0 and head_dim <= _FLASH_LARGEST and dtype in _FLASH_DTYPES
    return device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def packed_part(
    sequences: Sequence[SequenceRows], window: int | None, device: torch.device
) -> PackedPart:
    """sequences: all of a batch, in the order of their rows, without earlier context."""
    counts = [seq.count for seq in sequences if seq.count]
    ends = np.array([0, *itertools.accumulate(counts)], np.int32)
    return PackedPart(upload([ends], device)[0], max(counts), window)


def attend_packed(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, part: PackedPart, scale: float
) -> Tensor:
    """Return [T, H, d]."""
    out_THd: Tensor = torch.ops.aten._flash_attention_forward(
        q_THd,
        k_TGd,
        v_TGd,
        part.ends,
        part.ends,
        part.longest,
        part.longest,
        0.0,  # dropout
        True,  # causal, the last row at the last key
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if part.window is None else part.window - 1,
        window_size_right=None if part.window is None else 0,
    )[0]
    return out_THd
