"""Attention with sinks: each head has one more score, of a key that has no value.

Shapes: x leading dims, R query heads of one KV head, T query rows, S keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 256  # scores are kept in full: bound them


def attend_with_sinks(
    q_xRTd: Tensor,
    k_xSd: Tensor,
    v_xSd: Tensor,
    sinks_xR: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """[x, R, T, d]. mask: additive, broadcast to [x, R, T, S]; causal: T = S, no mask given."""
    T = q_xRTd.shape[-2]
    if causal:
        hidden = torch.full((T, T), float("-inf"), dtype=torch.float32, device=q_xRTd.device)
        mask = hidden.triu_(1)
    pieces = []
    for first in range(0, T, _ROWS):
        rows = slice(first, min(first + _ROWS, T))
        part = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        pieces.append(_rows(q_xRTd[..., rows, :], k_xSd, v_xSd, sinks_xR, part, scale))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def _rows(
    q_xRTd: Tensor,
    k_xSd: Tensor,
    v_xSd: Tensor,
    sinks_xR: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """The R heads' rows stand below each other, so that the keys are not repeated."""
    *x, R, T, d = q_xRTd.shape
    scores = torch.matmul(q_xRTd.reshape(*x, R * T, d), k_xSd.transpose(-1, -2))
    scores_xRTS = scores.view(*x, R, T, -1).float().mul_(scale)
    if mask is not None:
        scores_xRTS += mask
    sinks = sinks_xR.float()[..., None, None]
    largest = torch.maximum(scores_xRTS.amax(-1, keepdim=True), sinks)
    probs = scores_xRTS.sub_(largest).exp_()
    probs /= probs.sum(-1, keepdim=True) + (sinks - largest).exp_()
    attended = torch.matmul(probs.to(v_xSd.dtype).view(*x, R * T, -1), v_xSd)
    return attended.view(*x, R, T, v_xSd.shape[-1])
