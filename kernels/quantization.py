"""Dequantisation of checkpoint weights to float32.

Shapes: R rows, C columns; leading dims x are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes without tensors use the constants
    from torch import Tensor

FP8_BLOCK = 128  # rows and columns that share one scale
MXFP4_GROUP = 32  # elements that share one exponent
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


def dequantize(weight_RC: Tensor, scale: Tensor) -> Tensor:
    """Return int8 weights (`dequantize_int8`) or fp8 (`dequantize_fp8_blocks`) as float32."""
    is_fp8 = weight_RC.is_floating_point()
    return (dequantize_fp8_blocks if is_fp8 else dequantize_int8)(weight_RC, scale)


def dequantize_int8(weight_RC: Tensor, scale_RS: Tensor) -> Tensor:
    """Return weight * the scale of its group: each row has S groups of equal size."""
    (R, C), S = weight_RC.shape, scale_RS.shape[1]
    groups = weight_RC.float().view(R, S, C // S)
    return groups.mul_(scale_RS.float().unsqueeze(-1)).view(R, C)


def unpack_int8(packed: Tensor, columns: int) -> Tensor:
    """Return int8 [R, columns] from four numbers, which 128 is added to, in each int32."""
    import torch

    return (packed.view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)


def dequantize_fp8_blocks(weight_RC: Tensor, scale_inv: Tensor) -> Tensor:
    """Return weight * the scale of its block; scale_inv [ceil(R / 128), ceil(C / 128)]."""
    R, C = weight_RC.shape
    out_RC = weight_RC.float()
    for block, scales in enumerate(scale_inv.float()):
        first = block * FP8_BLOCK
        out_RC[first : min(first + FP8_BLOCK, R)] *= scales.repeat_interleave(FP8_BLOCK)[:C]
    return out_RC


def dequantize_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return [x, C] from blocks [x, C / 32, 16] uint8 and exponents [x, C / 32] uint8.

    A byte holds two elements, the lower half first. Exponents have base 2 and bias 127.
    """
    import torch

    table = torch.tensor(_FP4, dtype=torch.float32, device=blocks.device)
    table = torch.cat((table, -table))
    both = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[both.int()], exponents.to(torch.int32).sub_(127).unsqueeze(-1))
    return values.flatten(-2)
