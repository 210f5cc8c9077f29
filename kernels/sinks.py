"""Attention with sinks: each head has one more score, of a key without a value.

Shapes: x leading dims, R query heads of one KV head, T query rows, S keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 256  # queries of a piece
_SCORES = 1 << 25  # float32 scores of a piece, all heads
_LEAST_KEYS = 256


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
    """Return [x, R, T, d]. mask: additive, broadcast to [x, R, T, S]. causal: T = S, no mask.

    Memory beside the result: a few times _SCORES float32 numbers, for any T and S.
    """
    T = q_xRTd.shape[-2]
    pieces = []
    for first in range(0, T, _ROWS):
        last = min(first + _ROWS, T)
        q, k, v = q_xRTd[..., first:last, :], k_xSd, v_xSd
        part = mask[..., first:last, :] if mask is not None and mask.shape[-2] > 1 else mask
        if causal:
            k, v = k_xSd[..., :last, :], v_xSd[..., :last, :]
        heads = q.numel() // (q.shape[-2] * q.shape[-1])
        step = max(_LEAST_KEYS, _SCORES // (heads * (last - first)))
        if k.shape[-2] <= step:
            seen = _triangle(first, last, slice(0, last), q) if causal else part
            pieces.append(_rows(q, k, v, sinks_xR, seen, scale))
        else:
            pieces.append(_by_key_blocks(q, k, v, sinks_xR, part, scale, step, causal))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def _triangle(first: int, last: int, keys: slice, like: Tensor) -> Tensor:
    """Return the additive mask [rows, keys] of rows first..last-1 over a prompt's keys."""
    hidden = torch.full((last - first, keys.stop - keys.start), float("-inf"), device=like.device)
    return hidden.triu_(first + 1 - keys.start)


def _rows(
    q_xRTd: Tensor,
    k_xSd: Tensor,
    v_xSd: Tensor,
    sinks_xR: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend with the R heads' rows stacked, so that keys are not repeated."""
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


def _by_key_blocks(
    q_xRTd: Tensor,
    k_xSd: Tensor,
    v_xSd: Tensor,
    sinks_xR: Tensor,
    mask: Tensor | None,
    scale: float,
    step: int,
    causal: bool,
) -> Tensor:
    """Attend over pieces of `step` keys, starting at the sink. causal: rows are the last ones."""
    *x, R, T, d = q_xRTd.shape
    S = k_xSd.shape[-2]
    largest = sinks_xR.float()[..., None, None].expand(*x, R, T, 1)
    total = torch.ones_like(largest)
    attended = torch.zeros(*x, R, T, v_xSd.shape[-1], dtype=torch.float32, device=q_xRTd.device)
    q_xNd = q_xRTd.reshape(*x, R * T, d)
    for first in range(0, S, step):
        keys = slice(first, min(first + step, S))
        scores = torch.matmul(q_xNd, k_xSd[..., keys, :].transpose(-1, -2))
        scores_xRTK = scores.view(*x, R, T, -1).float().mul_(scale)
        if causal and keys.stop > S - T:
            scores_xRTK += _triangle(S - T, S, keys, q_xRTd)
        elif mask is not None:
            scores_xRTK += mask[..., keys]
        before, largest = largest, torch.maximum(scores_xRTK.amax(-1, keepdim=True), largest)
        probs = scores_xRTK.sub_(largest).exp_()
        kept = (before - largest).exp_()
        total = total * kept + probs.sum(-1, keepdim=True)
        values = torch.matmul(probs.to(v_xSd.dtype).view(*x, R * T, -1), v_xSd[..., keys, :])
        attended.mul_(kept).add_(values.view(*x, R, T, -1))
    return attended.div_(total).to(v_xSd.dtype)
