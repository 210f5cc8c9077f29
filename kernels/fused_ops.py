"""Memory-bound passes over a batch's activations, fused: norms, rotary embedding, sums of rows.

On the CPU numba compiles them (kernels/row_ops.py), on the GPU triton where it works. Elsewhere
torch's operations compute them. Results are equal except for the last bit.

Rope has the half-split layout, as Qwen and Mixtral store it.

Shapes: T tokens, H heads, d head dim, D model dim, F FFN dim, N (token, expert) pairs, K top-k.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from contracts.logs import event
from kernels import experts, row_ops
from kernels.linear import ExpertLinears
from kernels.stored import Storage
from kernels.stored_experts import StoredLinear

log = logging.getLogger(f"tandem.{__name__}")

_CHECK_SHAPE = (5, 6, 16)  # T, H, d
_TOLERANCE = 0.1  # for values of 1 to 10 in bfloat16


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, round_once: bool = False) -> Tensor:
    """Return the RMS norm, as `rms_norm_by_torch`."""
    if row_ops.is_compiled(x):
        D, out = x.shape[-1], torch.empty_like(x)
        addresses = x.data_ptr(), D, weight_D.data_ptr(), out.data_ptr()
        wide = x.dtype is torch.float32
        row_ops.rms_norm(wide, *addresses, x.numel() // D, D, eps, round_once)
        return out
    own = fused_kernels(x)
    if own is None or not x.is_contiguous():
        return rms_norm_by_torch(x, weight_D, eps, round_once=round_once)
    normed: Tensor = own.rms_norm(x, weight_D, eps, round_once)
    return normed


def rms_norm_by_torch(
    x: Tensor, weight_D: Tensor, eps: float, *, round_once: bool = False
) -> Tensor:
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


def layer_norm(x: Tensor, weight_2D: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm. weight_2D: weight, then bias."""
    D = x.shape[-1]
    if not row_ops.is_compiled(x):
        return functional.layer_norm(x, (D,), weight_2D[:D], weight_2D[D:], eps)
    out, wide = torch.empty_like(x), x.dtype is torch.float32
    addresses = x.data_ptr(), D, weight_2D.data_ptr(), out.data_ptr()
    row_ops.layer_norm(wide, *addresses, x.numel() // D, D, eps)
    return out


def norm_and_rope(
    x_THd: Tensor, weight_Hd: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return a new tensor: each head normed by its weight (None: not), then rotated by rope."""
    if (
        x_THd.shape[0]
        and row_ops.is_compiled(x_THd[0])
        and cos.is_contiguous()
        and sin.is_contiguous()
    ):
        T, H, d = x_THd.shape
        out = torch.empty((T, H, d), dtype=x_THd.dtype)
        weight = 0 if weight_Hd is None else weight_Hd.data_ptr()
        row_ops.norm_and_rope(
            x_THd.dtype is torch.float32, x_THd.data_ptr(), x_THd.stride(0), d, weight,
            cos.data_ptr(), sin.data_ptr(), out.data_ptr(), H * d, d, T, H, d, eps,
        )  # fmt: skip
        return out
    own = fused_kernels(x_THd)
    if own is None or x_THd.stride()[1:] != (x_THd.shape[2], 1):
        normed = x_THd if weight_Hd is None else rms_norm_by_torch(x_THd, weight_Hd, eps)
        return apply_rope(normed, cos, sin)
    out_THd: Tensor = own.norm_and_rope(x_THd, weight_Hd, eps, cos, sin)
    return out_THd


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


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid. torch's own differs in the last bit between places of a tensor."""
    if not row_ops.is_compiled(x):
        return x.sigmoid()
    numbers = torch.empty(x.shape).copy_(x)
    row_ops.sigmoid(numbers.data_ptr(), numbers.numel())
    return numbers.to(x.dtype)


def write_slots(pool_PGd: Tensor, slots_T: Tensor, x_TGd: Tensor) -> None:
    """Copy rows of x to slots of the pool."""
    if not x_TGd.shape[0] or not row_ops.is_compiled(x_TGd[0]):
        pool_PGd.index_copy_(0, slots_T, x_TGd)
        return
    row_ops.write_rows(
        x_TGd.element_size(),
        x_TGd.data_ptr(),
        x_TGd.stride(0),
        slots_T.data_ptr(),
        pool_PGd.data_ptr(),
        x_TGd.shape[0],
        x_TGd.shape[1] * x_TGd.shape[2],
    )


def gated(h_NF2: Tensor, count: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of [N, 2F], as a fresh [N, F]. count: as of `gather_rows`."""
    own = fused_kernels(h_NF2)
    if own is None:
        return experts.gated(h_NF2)
    out_NF: Tensor = own.gated(h_NF2, count)
    return out_NF


def gather_rows(x_TD: Tensor, rows_N: Tensor, count: Tensor | None = None) -> Tensor:
    """Return x[rows] as a new tensor [N, D].

    count int32 [1], on the device: number of rows that are needed; the others may hold anything.
    """
    own = fused_kernels(x_TD)
    if own is None or not x_TD.is_contiguous():
        return x_TD.index_select(0, rows_N)
    out_ND: Tensor = own.gather_rows(x_TD, rows_N, count)
    return out_ND


def weighted_sum(
    y_ND: Tensor, places_TK: Tensor, weights_TK: Tensor, out_TD: Tensor, count: Tensor | None = None
) -> None:
    """Fill out_TD float32: each token's weighted sum of the rows places_TK of y, in order of k.

    count int32 [1]: rows of y from there on, which may hold anything, count as zeros.
    """
    own = fused_kernels(y_ND)
    if own is not None:
        own.weighted_sums(y_ND, places_TK, weights_TK.contiguous(), out_TD, count)
        return
    if count is not None:
        rest_N1 = torch.arange(len(y_ND), device=y_ND.device).unsqueeze(1) >= count
        y_ND = y_ND.masked_fill(rest_N1, 0.0)
    out_TD.zero_()
    for k in range(places_TK.shape[1]):
        # Rounded before it is added, as on CPUs; addcmul_ would round once.
        out_TD += y_ND.index_select(0, places_TK[:, k]) * weights_TK[:, k : k + 1]


def pack_rows(
    x_TD: Tensor, rows_C: Tensor, meta: Sequence[Tensor], outs: Sequence[Tensor], absent: int
) -> None:
    """Fill outs with x[rows_C] [C, D] and copies of `meta`, pairs [C, 2K] int32 and counts_e.

    Rows of x whose K local experts are all `absent` need not be copied: nothing reads them.
    """
    x_CD, *others = outs
    own = fused_kernels(x_TD)
    if own is not None and x_TD.is_contiguous():
        own.pack_rows(x_TD, rows_C, *meta, *outs, absent)
        return
    torch.index_select(x_TD, 0, rows_C, out=x_CD)
    for tensor, out in zip(meta, others, strict=True):
        out.copy_(tensor)


def add_rows(total_TD: Tensor, rows_C: Tensor, y_CD: Tensor) -> None:
    """Add y to distinct rows of total, in place and in total's dtype."""
    own = fused_kernels(y_CD)
    if own is not None and y_CD.is_contiguous():
        own.add_rows(total_TD, rows_C, y_CD)
        return
    total_TD.index_add_(0, rows_C, y_CD.to(total_TD.dtype))


def fused_kernels(x: Tensor) -> ModuleType | None:
    """Return kernels/triton_kernels.py if it supports tensors such as `x`, or None."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or x.numel() == 0:
        return None
    here = x.device.index == torch.cuda.current_device()  # triton launches only there
    return _triton_kernels() if here else None


@functools.cache
def _triton_kernels() -> ModuleType | None:
    return import_checked("kernels.triton_kernels", _check_kernels)


def import_checked(name: str, check: Callable[[ModuleType], None]) -> ModuleType | None:
    """Import and check a module of triton's kernels; return None if that fails."""
    try:
        kernels = importlib.import_module(name)
        check(kernels)
    except Exception as error:  # noqa: BLE001  (no triton, no compiler, a wrong result: do without)
        reason = f"{name}: {type(error).__name__}: {error}"
        event(log, "fused_kernels_disabled", logging.WARNING, reason=reason)
        return None
    return kernels


def _check_kernels(kernels: ModuleType) -> None:
    """Raise AssertionError if a result differs from torch's."""
    T, H, d = _CHECK_SHAPE
    x_THd, other_THd = (torch.randn(T, H, d, device="cuda").bfloat16() for _ in range(2))
    weight_Hd = x_THd[0].contiguous()
    angles = torch.randn(T, 1, d // 2, device="cuda")
    angles_cs = angles.cos().bfloat16(), angles.sin().bfloat16()
    places_TK = torch.randperm(T * H, device="cuda").view(T, H)
    weights_TK = torch.rand(T, H, device="cuda")
    y_ND, weight_D = other_THd.view(T * H, d), weight_Hd[0]
    found_TD, sums_TD = (torch.empty(T, d, device="cuda") for _ in range(2))
    kernels.weighted_sums(y_ND, places_TK, weights_TK, found_TD)
    torch.sum(y_ND[places_TK].float() * weights_TK.unsqueeze(2), 1, out=sums_TD)
    pairs = [
        (kernels.rms_norm(x_THd, weight_D, 1e-6, False), rms_norm_by_torch(x_THd, weight_D, 1e-6)),
        (
            kernels.norm_and_rope(x_THd[:, 1:], weight_Hd[1:], 1e-6, *angles_cs),
            apply_rope(rms_norm_by_torch(x_THd[:, 1:], weight_Hd[1:], 1e-6), *angles_cs),
        ),
        (kernels.gated(y_ND), experts.gated(y_ND)),
        (kernels.gather_rows(y_ND, places_TK[0]), y_ND[places_TK[0]]),
        (found_TD, sums_TD),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
    _check_slot_kernels(kernels)
    _check_grouped_kernel(kernels)


def _check_slot_kernels(kernels: ModuleType) -> None:
    T, D, F = _CHECK_SHAPE
    x_TD = torch.randn(T, D, device="cuda").bfloat16()
    gate_up, down = (torch.randn(2, *s, device="cuda").bfloat16() for s in ((2 * F, D), (D, F)))
    slots_TK = torch.ones(T, 1, device="cuda", dtype=torch.int32)
    found_ND = torch.empty(T, D, device="cuda").bfloat16()
    kernels.slot_experts(x_TD, slots_TK, gate_up, down, found_ND)
    expected_ND = experts.gated(x_TD @ gate_up[1].t()) @ down[1].t()
    largest = expected_ND.abs().max().float()
    torch.testing.assert_close(
        found_ND / largest, expected_ND / largest, atol=_TOLERANCE, rtol=_TOLERANCE
    )


def _check_grouped_kernel(kernels: ModuleType) -> None:
    T, D, F = _CHECK_SHAPE
    x_TD, scales = torch.randn(T, D, device="cuda").bfloat16(), torch.rand(F, 1, device="cuda")
    codes = torch.randint(-9, 9, (F, D), dtype=torch.int8, device="cuda")
    products = [StoredLinear(Storage.INT8, each, scales, None) for each in (codes, -codes)]
    ends_e = torch.tensor([2, T], dtype=torch.int32, device="cuda")
    found_TF = kernels.grouped_products(x_TD, ExpertLinears(products, None), ends_e)
    expected_TF = torch.cat([products[0](x_TD[:2]), products[1](x_TD[2:])])
    torch.testing.assert_close(found_TF, expected_TF, atol=_TOLERANCE, rtol=_TOLERANCE)
