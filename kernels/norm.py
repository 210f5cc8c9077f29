"""RMS normalisation. Shapes: D model dim; leading dims are free."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, round_once: bool = False) -> Tensor:
    """Return x / rms(x) * weight over the last dim, in x's dtype; the mean is computed in float32.

    In bfloat16 it rounds as `transformers` does: after the division, then after the weight; with
    round_once only at the end (gpt-oss).
    """
    x_f32 = x.float()
    norm = torch.linalg.vector_norm(x_f32, dim=-1, keepdim=True)  # one pass, no squares in memory
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype is torch.float32:
        return torch.mul(x_f32, scale).mul_(weight_D)
    x_f32.mul_(scale)
    if round_once:
        return x_f32.mul_(weight_D).to(x.dtype)
    return x_f32.to(x.dtype).mul_(weight_D)
