"""Kernels for GPUs, as far as a CPU runs them (others: tests/gpu/)."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import fused_ops, gpu_experts
from kernels.experts import ClampedGate
from kernels.gpu_experts import Pairs, grouped_products, single_products
from kernels.linear import linears, plain_linears
from kernels.packed_attention import packed_part
from kernels.routing import softmax_top_k
from kernels.rows import SequenceRows
from tests.support import kernel_reference as reference

CPU = torch.device("cpu")


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 7), st.sampled_from([1, 4, 100]), st.booleans())
def test_gpu_experts_equal_reference(T: int, E: int, piece: int, clamped: bool) -> None:
    generator = torch.Generator().manual_seed(T * 10 + E)
    D, F, top_k = 6, 5, min(3, E)
    x_TD = torch.randn(T, D, generator=generator)
    gate_up, down = (torch.randn(E, *s, generator=generator) for s in ((2 * F, D), (D, F)))
    ids_TK, weights_TK = softmax_top_k(
        torch.randn(T, E, generator=generator), top_k, normalize=True
    )
    pairs = [
        (t, int(ids_TK[t, k]), float(weights_TK[t, k])) for t in range(T) for k in range(top_k)
    ]
    biases = [torch.randn(E, size, generator=generator) for size in (2 * F, D)]
    gate = ClampedGate(alpha=1.7, limit=2.0) if clamped else None
    into, out = (
        linears(weight, bias if clamped else None)
        for weight, bias in zip((gate_up, down), biases, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_experts, "PIECE_TOKENS", piece)
        out_TD = gpu_experts.gpu_experts(x_TD, ids_TK, weights_TK, into, out, gate)
    if gate is None:
        expected = reference.experts_reference(x_TD, gate_up, down, pairs)
    else:
        expected = reference.clamped_experts_reference(
            x_TD, gate_up, down, (biases[0], biases[1]), pairs, gate
        )
    assert out_TD.dtype is torch.float32
    torch.testing.assert_close(out_TD.double(), expected, atol=3e-5, rtol=1e-5)


def test_grouped_product_equals_single_products() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = plain_linears(torch.randn(5, 24, 16, generator=generator).bfloat16())
    ids_TK = torch.tensor([[3, 1], [1, 0], [3, 0], [4, 1]])  # expert 2 has no token
    pairs = Pairs(ids_TK, 5)
    assert pairs.ends_e.tolist() == [2, 5, 5, 7, 8]
    assert pairs.rows_N.tolist() == [1, 2, 0, 1, 3, 0, 2, 3]
    assert pairs.places_TK.tolist() == [[5, 2], [3, 0], [6, 1], [7, 4]]
    x_ND = torch.randn(4, 16, generator=generator).bfloat16()[pairs.rows_N]
    grouped, single = (
        products(x_ND, weight, pairs.ends_e) for products in (grouped_products, single_products)
    )
    torch.testing.assert_close(grouped, single)


def test_packed_part_has_bounds_and_keys_of_sequences() -> None:
    sequences = [
        SequenceRows(0, 3, 0, slice(32, 35)),
        SequenceRows(3, 0, 5, slice(0, 5)),  # no rows
        SequenceRows(3, 2, 4, torch.tensor([7, 8, 9, 20, 21, 22])),
    ]
    part = packed_part(sequences, 16, CPU)
    assert part.ends_q.tolist() == [0, 3, 5]
    assert part.ends_k.tolist() == [0, 3, 9]
    assert (part.longest_q, part.longest_k, part.window) == (3, 6, 16)
    assert isinstance(part.keys, torch.Tensor)
    assert part.keys.tolist() == [32, 33, 34, 7, 8, 9, 20, 21, 22]
    assert packed_part(sequences[:1], None, CPU).keys is None  # the fresh rows


def test_fused_ops_call_only_functions_of_the_triton_kernels() -> None:
    """Imported by name where triton works; elsewhere neither mypy nor a test would notice."""
    triton_source = Path(inspect.getfile(fused_ops)).with_name("triton_kernels.py").read_text()
    defined = {n.name for n in ast.parse(triton_source).body if isinstance(n, ast.FunctionDef)}
    called = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(fused_ops)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("own", "kernels")
    }
    assert called <= defined
    assert called >= {"slot_experts", "rms_norm"}
