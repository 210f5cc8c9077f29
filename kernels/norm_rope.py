"""RMS normalization, and rotary position embedding.

Rope has the half-split layout, as Qwen and Mixtral store it.

Shapes: T tokens, H heads, d head dim, D model dim; leading dims of norms are free.
"""

from __future__ import annotations

import math
from typing import Protocol

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


class RopeParameters(Protocol):
    """Parameters of `inverse_frequencies` (see models/spec/layer_spec.py)."""

    @property
    def theta(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def original_context_tokens(self) -> int: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def truncate(self) -> bool: ...


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Return radians per position of each of the head_dim / 2 rotated pairs, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    raise ValueError(f"rope kind {rope.kind!r} is not known")


def _llama3(plain: Tensor, rope: RopeParameters) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend linearly in between."""
    wavelength = 2 * math.pi / plain
    rotations = rope.original_context_tokens / wavelength
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: Tensor, rope: RopeParameters, head_dim: int) -> Tensor:
    """Keep pairs that rotate often in the original context, divide slow ones (YaRN)."""

    def pair_rotating(times: float) -> float:
        wavelength = rope.original_context_tokens / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_rotating(rope.beta_fast), pair_rotating(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    divide = ((pairs - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * divide + plain * (1 - divide)


def cos_sin(
    positions_T: Tensor, inv_freq: Tensor, *, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, d/2] in `dtype`, times `factor` (YaRN's temperature)."""
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
