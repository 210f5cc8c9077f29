"""Attention of many short sequences at once, padded to groups of similar size.

One call per sequence would take longer than its arithmetic.

Shapes: T new tokens, B sequences of a group, Q new tokens and S context of its longest, G KV heads,
R query heads of each, d head dim. Results of padded queries are dropped, padded keys hidden:

    sequence of 2 new tokens, context 3          0 0 0 -
    in a group with Q = 3, S = 4 (start 1)       0 0 0 -     rows: position start + i
                                     padding →   . . . .     keys: 0 .. S - 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.rows import SequenceRows, padded_slots

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
    firsts_B1 = torch.tensor([seq.first for seq in group]).unsqueeze(1)
    counts_B1 = torch.tensor([seq.count for seq in group]).unsqueeze(1)
    there_BQ = torch.arange(Q) < counts_B1
    rows_BQ = (firsts_B1 + torch.arange(Q)).where(there_BQ, 0)
    places_N = there_BQ.flatten().nonzero().squeeze(1)
    return ShortPart(
        rows_N=rows_BQ.flatten()[places_N].to(device),
        places_N=places_N.to(device),
        padded_rows=rows_BQ.flatten().to(device),
        keys=padded_slots([seq.slots_S for seq in group], S).flatten().to(device),
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
