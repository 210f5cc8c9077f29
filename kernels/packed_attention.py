"""Attention of a ragged batch in one call of torch's flash attention on a GPU.

No padding, no mask, KV heads not repeated. A sequence's last row sees its last key.

    rows    | seq 0: 3 new | seq 1: 2 new |          ends_q  0 3 5
    keys    | 3            | 4 cached + 2 |          ends_k  0 3 9

Shapes: T new tokens, H query heads, G KV heads, d head dim, P pool slots, B sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.rows import Keys, SequenceRows, take

_DTYPES = (torch.bfloat16, torch.float16)
_STEP, _LARGEST = 8, 256  # head dims of the kernel


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPart:
    """ends_q, ends_k int32 [B + 1]: bounds of each sequence's rows and keys.

    keys: pool slots of all contexts; None without earlier contexts: the fresh rows are the keys.
    window W: position p sees p-W+1 .. p.
    """

    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int
    keys: Keys | None
    window: int | None


def supports_packed(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Return whether torch has the kernel."""
    fits = head_dim % _STEP == 0 and head_dim <= _LARGEST and dtype in _DTYPES
    return device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def packed_part(
    sequences: Sequence[SequenceRows], window: int | None, device: torch.device
) -> PackedPart:
    """sequences: all of a batch, in the order of their rows."""
    seqs = [seq for seq in sequences if seq.count]
    counts, contexts = [seq.count for seq in seqs], [seq.context for seq in seqs]
    earlier = any(seq.start for seq in seqs)
    return PackedPart(
        ends_q=_ends(counts, device),
        ends_k=_ends(contexts, device),
        longest_q=max(counts),
        longest_k=max(contexts),
        keys=_joined([seq.slots_S for seq in seqs], device) if earlier else None,
        window=window,
    )


def attend_packed(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: PackedPart,
    scale: float,
) -> Tensor:
    """Return [T, H, d]. The new k and v must already be in the pool."""
    out_THd: Tensor = torch.ops.aten._flash_attention_forward(
        q_THd,
        k_TGd if part.keys is None else take(k_pool_PGd, part.keys),
        v_TGd if part.keys is None else take(v_pool_PGd, part.keys),
        part.ends_q,
        part.ends_k,
        part.longest_q,
        part.longest_k,
        0.0,  # dropout
        True,  # causal, the last row at the last key
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if part.window is None else part.window - 1,
        window_size_right=None if part.window is None else 0,
    )[0]
    return out_THd


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)


def _joined(keys: Sequence[Keys], device: torch.device) -> Tensor:
    return torch.cat(
        [
            torch.arange(piece.start, piece.stop, device=device)
            if isinstance(piece, slice)
            else piece
            for piece in keys
        ]
    )
