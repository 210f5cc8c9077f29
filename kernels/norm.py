"""RMS normalisation. Shapes: D model dim; leading dims are free."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, round_once: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dim, in x's dtype; the mean is taken in float32.

    In bfloat16 it rounds where `transformers` does: after the division, then after the weight; or
    only at the end (gpt-oss).
    """
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.square().mean(-1, keepdim=True).add_(eps))
    if x.dtype is torch.float32 or round_once:
        return torch.mul(x_f32, scale).mul_(weight_D).to(x.dtype)
    return torch.mul(x_f32, scale).to(x.dtype).mul_(weight_D)
