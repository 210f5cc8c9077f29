"""RMS normalization, and rotary position embedding.

Rope has the half-split layout, as Qwen and Mixtral store it.

Shapes: T tokens, H heads, d head dim, D model dim; leading dims of norms are free.
"""

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


def cos_sin(
    positions_T: Tensor, inv_freq: Tensor, *, factor: float | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, d/2] in `dtype`, times `factor` (YaRN's temperature).

    factor: of all pairs, or of each, [d/2].
    """
    angles = positions_T.float().unsqueeze(1) * inv_freq
    return (
        (angles.cos() * factor).to(dtype).unsqueeze(1),
        (angles.sin() * factor).to(dtype).unsqueeze(1),
    )


def apply_rope(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a new tensor: each pair (i, i + d/2) of every head rotated by its position's angle."""
    half = x_THd.shape[-1] // 2
    first, second = x_THd[..., :half], x_THd[..., half:]
    rotated = torch.empty(x_THd.shape, dtype=x_THd.dtype, device=x_THd.device)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated
