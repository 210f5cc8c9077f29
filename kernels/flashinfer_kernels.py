"""Attention over pages, and probabilities that tokens are drawn from, by FlashInfer if installed.

A part is planned at its first layer, and the plan is used at all of them. Splits have a fixed
length, so that a row's bits do not depend on the batch, except with latents. Chunked windows, odd
sizes and captured layers are left to triton's kernels.

Shapes: N rows, B sequences, H query heads, G KV heads, d head dim, v of a value, V vocabulary, K of
it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import upload
from kernels.fused_ops import import_checked
from kernels.pages import PagedPart

_WORKSPACE_BYTES = 128 << 20
_BACKEND = "fa2"  # the only one with splits of a fixed length
_HEAD_DIMS = (64, 128, 256)
_LATENT_DIMS = (576, 512)  # of an entry, and of its latent


class Rows(NamedTuple):
    """Rows first .. last-1, in order; ends of sequences in rows and blocks, from 0; contexts."""

    first: int
    last: int
    ends_q: NDArray[np.int32]
    ends_k: NDArray[np.int32]
    contexts_B: NDArray[np.int32]
    blocks: NDArray[np.int64]  # places in the block tables


def kind_of(q_THd: Tensor, v: int, sinks_H: Tensor | None) -> str:
    """Return the kind of attention, each of which is a kernel of its own."""
    if v < q_THd.shape[2]:
        return "latent"
    return "plain" if sinks_H is None else "sinks"


def supports(q_THd: Tensor, v: int, part: PagedPart) -> bool:
    """Return whether FlashInfer computes this part. v: elements of a value."""
    d, is_latent = q_THd.shape[2], v < q_THd.shape[2]
    fits = (d, v) == _LATENT_DIMS if is_latent else d in _HEAD_DIMS
    fits = fits and not part.seen.chunked and not (is_latent and part.seen.window)
    return fits and rows_of(part) is not None


def rows_of(part: PagedPart) -> Rows | None:
    """Return the rows of a part, or None if they are not consecutive, or not known on the host."""
    tiles = part.host_tiles
    if not len(tiles) or np.any(tiles[1:, 0] != tiles[:-1, 0] + tiles[:-1, 1]):
        return None
    begins = np.flatnonzero(np.diff(tiles[:, 3], prepend=-1))
    ends = np.append(begins[1:], len(tiles)) - 1
    firsts, stops = tiles[begins, 0], tiles[ends, 0] + tiles[ends, 1]
    contexts_B = tiles[ends, 1] + tiles[ends, 2]
    counts = -(-contexts_B // part.pages.block_tokens)
    width = part.pages.blocks_BW.shape[1]
    blocks = [
        table * width + np.arange(count)
        for table, count in zip(tiles[begins, 3].tolist(), counts.tolist(), strict=True)
    ]
    first = int(firsts[0])
    ends_q = np.append(0, stops - first).astype(np.int32)
    ends_k = np.append(0, np.cumsum(counts)).astype(np.int32)
    return Rows(first, int(stops[-1]), ends_q, ends_k, contexts_B, np.concatenate(blocks))


def attend(
    q_THd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PagedPart,
    out_THv: Tensor,
    scale: float,
    sinks_H: Tensor | None,
) -> None:
    """Do what `paged_attention.attend_paged` does, for a supported part."""
    kind = kind_of(q_THd, out_THv.shape[2], sinks_H)
    planned = part.planned.get(kind)
    if planned is None:
        sizes = q_THd.shape[1], k_pool_PGd.shape[1], q_THd.shape[2], out_THv.shape[2]
        planned = part.planned[kind] = _planned(kind, part, sizes, q_THd, scale)
    rows, wrapper = planned
    q, out = q_THd[rows.first : rows.last], out_THv[rows.first : rows.last]
    page = part.pages.block_tokens
    k, v = (pool.view(-1, page, *pool.shape[1:]) for pool in (k_pool_PGd, v_pool_PGd))
    if kind == "latent":
        rank, k = out.shape[2], k.squeeze(2)
        wrapper.run(q[..., :rank], q[..., rank:], k[..., :rank], k[..., rank:], out=out)
    elif sinks_H is not None:
        wrapper.run(q, (k, v), sinks_H.float(), scale, out=out)
    else:
        wrapper.run(q, (k, v), out=out)


def _planned(
    kind: str, part: PagedPart, sizes: tuple[int, int, int, int], q: Tensor, scale: float
) -> tuple[Rows, Any]:
    """Return the rows and a wrapper that is planned for them. sizes: H, G, d, v."""
    (H, G, d, v), rows, page = sizes, rows_of(part), part.pages.block_tokens
    assert rows is not None
    ends_q, ends_k, contexts_B = map(torch.from_numpy, (rows.ends_q, rows.ends_k, rows.contexts_B))
    (places,) = upload([rows.blocks], q.device)
    blocks = part.pages.blocks_BW.flatten().index_select(0, places)
    left = part.seen.window - 1 if part.seen.window else -1
    memory, library = _workspace(q.device), importlib.import_module("flashinfer")
    if kind == "latent":
        wrapper = library.mla.BatchMLAPagedAttentionWrapper(memory, backend=_BACKEND)
        wrapper.plan(
            qo_indptr=ends_q, kv_indptr=ends_k, kv_indices=blocks, kv_len_arr=contexts_B,
            num_heads=H, head_dim_ckv=v, head_dim_kpe=d - v, page_size=page, causal=True,
            sm_scale=scale, q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        return rows, wrapper
    if kind == "sinks":
        wrapper = library.attention.BatchAttentionWithAttentionSinkWrapper(
            memory, backend=_BACKEND, q_data_type=q.dtype, kv_data_type=q.dtype,
            head_dim_qk=d, head_dim_vo=d, window_left=left,
        )  # fmt: skip
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(memory, backend=_BACKEND)
    wrapper.plan(
        qo_indptr=ends_q, paged_kv_indptr=ends_k, paged_kv_indices=blocks,
        paged_kv_last_page_len=(contexts_B - 1) % page + 1, num_qo_heads=H, num_kv_heads=G,
        head_dim_qk=d, page_size=page, causal=True, sm_scale=scale, window_left=left,
        q_data_type=q.dtype, kv_data_type=q.dtype,
        fixed_split_size=max(1, part.seen.split_keys // page),
    )  # fmt: skip
    return rows, wrapper


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Return memory that all plans share; a stream runs one at a time."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def top_probs(logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    """Return probabilities of the top_k tokens, of as few as reach top_p; of others 0.

    They are not normalized. FlashInfer keeps all tokens that are as likely as the last of them.
    """
    library = library_on(logits_NV.device.type)
    by = _by_torch if library is None else functools.partial(_by_library, library)
    return by(logits_NV, top_k, top_p_N)


def _by_library(library: Any, logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    V = logits_NV.shape[1]
    probs_NV = logits_NV.softmax(-1).nan_to_num_(1.0 / V)  # the search in a NaN would not end
    kept_NV = library.top_k_renorm_probs(probs_NV, top_k) if top_k < V else probs_NV
    kept_NV = library.top_p_renorm_probs(kept_NV, top_p_N.float().clamp(1e-6))
    return probs_NV.masked_fill_(kept_NV == 0.0, 0.0)  # the bits of its own sums vary


def _by_torch(logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    logits_NK, ids_NK = logits_NV.topk(top_k)
    probs_NK = logits_NK.softmax(-1)
    dropped_NK = (probs_NK.cumsum(-1) - probs_NK) >= top_p_N.float().unsqueeze(1)
    dropped_NK[:, 0] = False  # top_p may be 0
    return torch.zeros_like(logits_NV).scatter_(1, ids_NK, probs_NK.masked_fill_(dropped_NK, 0.0))


@functools.cache
def library_on(kind: str) -> ModuleType | None:
    """Return FlashInfer's module if it is installed and right on such devices, or None."""
    is_installed = kind == "cuda" and importlib.util.find_spec("flashinfer") is not None
    return import_checked("flashinfer.sampling", _check_sampling) if is_installed else None


def _check_sampling(library: ModuleType, device: str = "cuda") -> None:
    """Raise AssertionError if a result differs from that of torch's operations."""
    given = torch.randn(3, 4000, device=device), 50, torch.tensor([0.0, 0.5, 1.0], device=device)
    pair = _by_library(library, *given), _by_torch(*given)
    torch.testing.assert_close(*(each_NV / each_NV.sum(1, keepdim=True) for each_NV in pair))
