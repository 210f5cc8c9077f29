"""Products with weights equal references and do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear import PackedLinear, PlainLinear, is_packed, linear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_product_equals_float64(T: int, N: int, K: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(T + 71 * N + 5041 * K)
    x, weight = (torch.randn(rows, K, generator=generator) for rows in (T, N))
    bias = torch.randn(N, generator=generator) if biased else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    out = PackedLinear(weight, bias)(x)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=1e-5)


@DTYPES
def test_row_has_equal_bits_in_any_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 96, generator=generator).to(dtype)
    layer = PackedLinear(torch.randn(130, 96, generator=generator).to(dtype))
    whole = layer(x)
    for rows in (1, 2, 3, 7, 16, 33, 128):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(130, 96), (40, 48), (512, 512), (1, 7), (96, 192)])
def test_plain_linear_has_bits_of_packed_linear(dtype: torch.dtype, N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(N + K)
    x = torch.randn(80, K, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, K), (N,)))
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
    for rows in (0, 1, 2, 3, 7, 17, 33, 80):
        assert torch.equal(plain(x[:rows]), packed(x[:rows])), rows


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(130, 96), (512, 256), (1, 7), (22, 13)])
def test_packed_weight_accepts_bytes_of_another(dtype: torch.dtype, N: int, K: int) -> None:
    if not is_packed(dtype, torch.device("cpu")):
        pytest.skip(f"this processor has no packed layout for {dtype}")
    generator = torch.Generator().manual_seed(N + K)
    x, weight, other = (torch.randn(rows, K, generator=generator).to(dtype) for rows in (80, N, N))
    expected, layer = PackedLinear(weight), PackedLinear(other)
    assert layer.layout == expected.layout
    layer.memory.copy_(expected.memory)
    for rows in (1, 3, 80):
        assert torch.equal(layer(x[:rows]), expected(x[:rows])), rows
    memory = layer.memory
    del layer
    assert torch.equal(memory, expected.memory), "the weight lives as long as its memory"


@DTYPES
def test_linear_has_bits_of_packed_linear(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 96, generator=generator).to(dtype)
    weight = torch.randn(130, 96, generator=generator).to(dtype)
    assert torch.equal(linear(x, weight), PackedLinear(weight)(x))
