"""Dequantisation against references and `transformers`."""

from __future__ import annotations

import pytest
import torch

from kernels.quantization import FP8_BLOCK, dequantize_fp8_blocks, dequantize_mxfp4
from tests.support.kernel_reference import dequantize_fp8_reference, dequantize_mxfp4_reference


@pytest.mark.parametrize(("R", "C"), [(3, 5), (128, 256), (130, 129), (257, 60)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_equal_reference(R: int, C: int, scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(R + C)
    weight = (torch.randn(R, C, generator=generator) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-R // FP8_BLOCK), -(-C // FP8_BLOCK), generator=generator)
    scales = scales.to(scale_dtype)
    found = dequantize_fp8_blocks(weight, scales)
    assert found.dtype is torch.float32
    expected = dequantize_fp8_reference(weight, scales, FP8_BLOCK)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=1e-7)


def test_mxfp4_equals_reference() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    exponents = torch.tensor([[0, 100, 126, 127, 128, 130, 150, 250]] * 2, dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, exponents)
    assert found.shape == (2, 8 * 32)
    for row in range(2):
        for group in range(8):
            expected = dequantize_mxfp4_reference(
                blocks[row, group].tolist(), int(exponents[row, group])
            )
            assert found[row, group * 32 : (group + 1) * 32].tolist() == expected
