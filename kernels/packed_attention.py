"""Attention of a ragged batch in one call of torch's flash attention on a GPU.

No padding, no mask, KV heads not repeated. A sequence's last row sees its last key.

    rows    | seq 0: 3 new | seq 1: 2 new |          ends_q  0 3 5
    keys    | 3            | 4 cached + 2 |          ends_k  0 3 9

Shapes: T new tokens, H query heads, G KV heads, d head dim, P pool slots, B sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.device import upload

Keys = slice | Tensor  # consecutive pool slots (a view) or a list (a gather)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: rows first .. first+count-1 are positions start .. start+count-1.

    slots_S: pool slots of positions 0 .. start+count-1, a slice if they are consecutive.
    host_slots_S: the same, of a batch on a device; plans are made from it.
    """

    first: int
    count: int
    start: int
    slots_S: Keys
    host_slots_S: NDArray[np.int64] | None = None

    @property
    def host_keys(self) -> slice | NDArray[np.int64]:
        """Slots on the host. Waits for the device if they are only there."""
        if isinstance(self.slots_S, slice):
            return self.slots_S
        if self.host_slots_S is not None:
            return self.host_slots_S
        slots_S: NDArray[np.int64] = self.slots_S.numpy(force=True)
        return slots_S

    @property
    def context(self) -> int:
        return self.start + self.count

    def chunks(self, size: int) -> Iterator[SequenceRows]:
        """Yield the rows of each `size` positions, as a sequence of its own."""
        for start in range(self.start - self.start % size, self.context, size):
            first, last = max(self.start, start), min(self.context, start + size)
            row, keys = self.first + first - self.start, self.slots_S
            if isinstance(keys, slice):
                slots: Keys = slice(keys.start + start, keys.start + last)
            else:
                slots = keys[start:last]
            yield SequenceRows(row, last - first, first - start, slots)


def take(pool_PGd: Tensor, keys: Keys) -> Tensor:
    """Return the pool's entries at `keys`, in order."""
    return pool_PGd[keys] if isinstance(keys, slice) else pool_PGd.index_select(0, keys)


def padded_slots(keys_B: Sequence[slice | NDArray[np.int64]], width: int) -> NDArray[np.int64]:
    """Return [B, width]: each sequence's slots, then zeros."""
    slots_BS = np.zeros((len(keys_B), width), dtype=np.int64)
    for slots_S, keys in zip(slots_BS, keys_B, strict=True):
        if isinstance(keys, slice):
            slots_S[: keys.stop - keys.start] = np.arange(keys.start, keys.stop)
        else:
            slots_S[: len(keys)] = keys
    return slots_BS


_SHORT_SCORES = 1 << 14  # of one head; above, a call of its own costs little
_MIN_FILL = 0.75  # of queries and of keys
_GROUP_SLOTS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class ShortPart:
    """Rows rows_N of the batch, and their places_N among the B * Q padded ones.

    padded_rows: a row for each padded one. keys: B * S pool slots. mask [B, 1, Q, S] is additive;
    None if all sequences start at position 0 (causal).
    """

    rows_N: Tensor
    places_N: Tensor
    padded_rows: Tensor
    keys: Tensor
    sequences: int
    mask: Tensor | None


def split_short(
    sequences: Sequence[SequenceRows], window: int | None
) -> tuple[list[list[SequenceRows]], list[SequenceRows]]:
    """Return (groups of at least two similar sequences, all others)."""
    short, others = list[SequenceRows](), list[SequenceRows]()
    for seq in sequences:
        whole = window is None or seq.context <= window
        fits = seq.count > 1 and whole and seq.count * seq.context <= _SHORT_SCORES
        (short if fits else others).append(seq)
    groups: list[_Group] = []
    for seq in sorted(short, key=lambda seq: (-seq.count, -seq.context)):
        if not groups or not groups[-1].add(seq):
            groups.append(_Group(seq))
    others += [group.members[0] for group in groups if len(group.members) == 1]
    return [group.members for group in groups if len(group.members) > 1], others


class _Group:
    """A group that grows by sequences in descending order of new tokens."""

    def __init__(self, first: SequenceRows) -> None:
        self.members = [first]
        self._least = self._most = first.context

    def add(self, seq: SequenceRows) -> bool:
        """Add the sequence unless padding or slots exceed the bounds; return whether it fits."""
        least, most = min(self._least, seq.context), max(self._most, seq.context)
        fits = (
            seq.count >= _MIN_FILL * self.members[0].count
            and least >= _MIN_FILL * most
            and (len(self.members) + 1) * most <= _GROUP_SLOTS
        )
        if fits:
            self.members.append(seq)
            self._least, self._most = least, most
        return fits


def short_part(
    group: Sequence[SequenceRows], dtype: torch.dtype, device: torch.device
) -> ShortPart:
    """dtype: of the queries."""
    B, Q = len(group), max(seq.count for seq in group)
    S = max(seq.context for seq in group)
    firsts_B1 = np.array([[seq.first] for seq in group])
    counts_B1 = np.array([[seq.count] for seq in group])
    there_BQ = np.arange(Q) < counts_B1
    rows_N = np.where(there_BQ, firsts_B1 + np.arange(Q), 0).ravel()
    places_N = there_BQ.ravel().nonzero()[0]
    keys_N = padded_slots([seq.host_keys for seq in group], S).ravel()
    chosen_N, places, padded_rows, keys = upload(
        [rows_N[places_N], places_N, rows_N, keys_N], device
    )
    return ShortPart(
        rows_N=chosen_N,
        places_N=places,
        padded_rows=padded_rows,
        keys=keys,
        sequences=B,
        mask=_mask([seq.start for seq in group], Q, S, dtype, device),
    )


def _mask(
    starts: Sequence[int], Q: int, S: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if not any(starts):
        return None
    starts_B11 = torch.tensor(starts).view(-1, 1, 1)
    hidden_BQS = torch.arange(S) > starts_B11 + torch.arange(Q).unsqueeze(1)
    mask_BQS = torch.zeros(hidden_BQS.shape).masked_fill_(hidden_BQS, float("-inf"))
    return mask_BQS.unsqueeze(1).to(device=device, dtype=dtype)


def attend_short(
    q_TGRd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    part: ShortPart,
    out_TGRd: Tensor,
    scale: float,
) -> None:
    """Write the attention of a group's queries to its rows of out_TGRd."""
    G, R, d = q_TGRd.shape[1:]
    B = part.sequences
    q_BQGRd = q_TGRd.index_select(0, part.padded_rows).view(B, -1, G, R, d)
    k_BGSd = k_pool_PGd.index_select(0, part.keys).view(B, -1, G, d).transpose(1, 2)
    v_BGSd = v_pool_PGd.index_select(0, part.keys).view(B, -1, G, d).transpose(1, 2)
    if part.mask is None:
        attended_NGRd = _causal(q_BQGRd, k_BGSd, v_BGSd, scale)
    else:
        attended_NGRd = _masked(q_BQGRd, k_BGSd, v_BGSd, part.mask, scale)
    out_TGRd.index_copy_(0, part.rows_N, attended_NGRd.index_select(0, part.places_N))


def _causal(q_BQGRd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, scale: float) -> Tensor:
    """Return [B * Q, G, R, d]."""
    G, R, d = q_BQGRd.shape[2:]
    q_BHQd = q_BQGRd.flatten(2, 3).transpose(1, 2)
    attended_BHQd = functional.scaled_dot_product_attention(
        q_BHQd, k_BGSd, v_BGSd, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended_BHQd.transpose(1, 2).reshape(-1, G, R, d)


def _masked(
    q_BQGRd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, mask_B1QS: Tensor, scale: float
) -> Tensor:
    """Return [B * Q, G, R, d]; the R queries of a KV head and token are consecutive rows."""
    B, Q, G, R, d = q_BQGRd.shape
    S = k_BGSd.shape[2]
    q_BGNd = q_BQGRd.transpose(1, 2).reshape(B, G, Q * R, d)
    mask_B1NS = mask_B1QS.unsqueeze(3).expand(B, 1, Q, R, S).reshape(B, 1, Q * R, S)
    attended_BGNd = functional.scaled_dot_product_attention(
        q_BGNd, k_BGSd, v_BGSd, attn_mask=mask_B1NS, scale=scale
    )
    return attended_BGNd.view(B, G, Q, R, d).transpose(1, 2).reshape(B * Q, G, R, d)


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
    ends_q, ends_k = upload([_ends(counts), _ends(contexts)], device)
    return PackedPart(
        ends_q=ends_q,
        ends_k=ends_k,
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


def _ends(sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.array([0, *itertools.accumulate(sizes)], np.int32)


def _joined(keys: Sequence[Keys], device: torch.device) -> Tensor:
    return torch.cat(
        [
            torch.arange(piece.start, piece.stop, device=device)
            if isinstance(piece, slice)
            else piece
            for piece in keys
        ]
    )
