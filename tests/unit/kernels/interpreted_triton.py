"""Triton kernels in the interpreter against references, in sizes that fill no block.

Run by test_triton.py in a process of its own. The interpreter truncates to bfloat16 instead of
rounding, so values may differ by two steps; float32 and float16 are computed as on a GPU.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import experts, fused_ops, paged_attention
from kernels import triton_attention as attention
from kernels import triton_kernels as fused
from kernels.attention_ops import SequenceRows
from kernels.linear import ExpertLinears, PackedLinear
from kernels.pages import Pages, Seen, plan_paged
from kernels.stored import Storage
from kernels.stored_experts import StoredLinear
from tests.support import kernel_reference as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Tolerance of values of order 1: one rounding, and one step for rounded intermediate results.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
EPS = 1e-6

kinds = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Compare with `expected` of any dtype. factor: magnitude of the values."""
    allowed = TOLERANCE[dtype] * factor
    torch.testing.assert_close(found.double(), expected.double(), atol=allowed, rtol=allowed)


@kinds
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 64), (2, 3, 129)])
@pytest.mark.parametrize("round_once", [False, True])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...], round_once: bool) -> None:
    x, weight_D = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    found = fused.rms_norm(x, weight_D, EPS, round_once)
    close(found, reference.rms_norm_reference(x, weight_D, EPS), dtype, 4.0)
    expected = fused_ops.rms_norm_by_torch(x, weight_D, EPS, round_once=round_once)
    close(found, expected, dtype, 4.0)
    assert found.dtype is dtype
    if dtype is torch.float16:  # rounded where torch's operations round
        assert (found == expected).float().mean() > 0.97


@kinds
@pytest.mark.parametrize(("T", "H", "d"), [(1, 1, 2), (3, 17, 6), (5, 16, 16), (2, 33, 22)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_norm_and_rope(dtype: torch.dtype, T: int, H: int, d: int, with_norm: bool) -> None:
    """Heads are parts of wider rows, as queries in the joint projection."""
    x_THd = normal(T, H + 2, d, dtype=dtype)[:, 1:-1]
    weight_Hd = normal(H, d, dtype=dtype, seed=1) if with_norm else None
    positions_T = torch.arange(T) * 7 + 3
    inv_freq = 0.5 ** torch.arange(d // 2)
    angles = positions_T[:, None, None] * inv_freq
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = fused.norm_and_rope(x_THd, weight_Hd, EPS, cos, sin)
    normed = x_THd if weight_Hd is None else fused_ops.rms_norm_by_torch(x_THd, weight_Hd, EPS)
    close(found, fused_ops.apply_rope(normed, cos, sin), dtype, 4.0)
    if dtype is torch.float32:
        exact = x_THd if weight_Hd is None else reference.rms_norm_reference(x_THd, weight_Hd, EPS)
        close(found, reference.rope_reference(exact, positions_T, inv_freq), dtype, 4.0)


@kinds
@pytest.mark.parametrize(("N", "F"), [(1, 1), (4, 5), (3, 64), (2, 129)])
def test_gate(dtype: torch.dtype, N: int, F: int) -> None:
    h_NF2 = 3 * normal(N, 2 * F, dtype=dtype)
    gate, up = h_NF2.double().chunk(2, dim=1)
    found = fused.gated(h_NF2)
    close(found, gate / (1 + torch.exp(-gate)) * up, dtype, 4.0)
    close(found, experts.gated(h_NF2), dtype, 4.0)


@kinds
def test_gate_of_large_values_is_finite(dtype: torch.dtype) -> None:
    """exp(-gate) overflows to infinity: the result is 0."""
    h_NF2 = torch.tensor([[-200.0, 200.0, 2.0, 3.0]], dtype=dtype)
    assert fused.gated(h_NF2).tolist() == [[0.0, 600.0]]


@kinds
@pytest.mark.parametrize(("N", "D"), [(0, 3), (1, 1), (5, 7), (9, 130)])
def test_rows(dtype: torch.dtype, N: int, D: int) -> None:
    x_TD = normal(4, D, dtype=dtype)
    rows_N = torch.randint(4, (N,), generator=torch.Generator().manual_seed(N))
    assert torch.equal(fused.gather_rows(x_TD, rows_N), x_TD[rows_N])


@kinds
@pytest.mark.parametrize(("T", "K", "D"), [(1, 1, 1), (3, 2, 5), (4, 8, 129)])
def test_sums_are_in_order_of_choice(dtype: torch.dtype, T: int, K: int, D: int) -> None:
    y_ND = normal(T * K, D, dtype=dtype)
    places_TK = torch.randperm(T * K, generator=torch.Generator().manual_seed(1)).view(T, K)
    weights_TK = torch.rand(T, K, generator=torch.Generator().manual_seed(2))
    found_TD = torch.empty(T, D)
    fused.weighted_sums(y_ND, places_TK, weights_TK, found_TD)
    expected_TD = torch.zeros(T, D)
    for k in range(K):
        expected_TD += weights_TK[:, k : k + 1] * y_ND[places_TK[:, k]].float()
    assert torch.equal(found_TD, expected_TD)


@settings(max_examples=12)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(3, 5), (17, 9), (8, 16), (260, 3), (5, 300)]),
    st.integers(0, 1000),
)
def test_slot_experts_equal_reference(
    dtype: torch.dtype, T: int, K: int, sizes: tuple[int, int], seed: int
) -> None:
    """Rows without a slot are unchanged; an expert's slot changes no bit."""
    (D, F), slots = sizes, 4
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(T, D, generator=generator).to(dtype)
    gate_up = (torch.randn(slots, 2 * F, D, generator=generator) * D**-0.5).to(dtype)
    down = (torch.randn(slots, D, F, generator=generator) * F**-0.5).to(dtype)
    slots_TK = torch.randint(-1, slots, (T, K), generator=generator, dtype=torch.int32)
    y_ND = torch.full((T * K, D), 7.0, dtype=dtype)
    fused.slot_experts(x_TD, slots_TK, gate_up, down, y_ND)
    expected_ND = torch.full((T * K, D), 7.0, dtype=torch.float64)
    for n, slot in enumerate(slots_TK.flatten().tolist()):
        if slot >= 0:
            pairs = [(0, slot, 1.0)]
            expected_ND[n] = reference.experts_reference(x_TD[n // K :][:1], gate_up, down, pairs)
    close(y_ND, expected_ND, dtype, 4.0)
    moved = torch.tensor([2, 0, 3, 1])
    elsewhere = [torch.empty_like(weight) for weight in (gate_up, down)]
    for weight, other in zip((gate_up, down), elsewhere, strict=True):
        other[moved] = weight
    there_TK = torch.where(slots_TK < 0, slots_TK, moved.int()[slots_TK.clamp(min=0)])
    again_ND = torch.full_like(y_ND, 7.0)
    there_TK = there_TK.flip(0).contiguous()
    fused.slot_experts(x_TD, there_TK, elsewhere[0], elsewhere[1], again_ND)
    flipped_ND = torch.full_like(y_ND, 7.0)
    fused.slot_experts(x_TD, slots_TK.flip(0).contiguous(), gate_up, down, flipped_ND)
    assert torch.equal(again_ND, flipped_ND)


def stored_product(storage: Storage, N: int, K: int, seed: int, *, bias: bool) -> StoredLinear:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(N, generator=generator).half() if bias else None
    if storage is Storage.MXFP4:
        blocks = torch.randint(256, (N, K // 32, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(118, 125, (N, K // 32), generator=generator, dtype=torch.uint8)
        return StoredLinear(storage, blocks, exponents, made)
    scales = 0.01 * torch.rand(N, -(-K // 128), generator=generator)
    if storage is Storage.INT8:
        codes = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
        return StoredLinear(storage, codes, scales, made)
    codes = torch.randint(256, (N, K), generator=generator, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    return StoredLinear(storage, codes, scales, made)


storages = pytest.mark.parametrize("storage", [Storage.MXFP4, Storage.FP8, Storage.INT8])


@storages
def test_products_unpack_every_code_to_the_bit(storage: Storage) -> None:
    """Products with the rows of an identity are the weight's columns."""
    N, K = 70, 160
    product = stored_product(storage, N, K, 1, bias=False)
    found_KN = fused.grouped_products(
        torch.eye(K), ExpertLinears([product], None), torch.tensor([K], dtype=torch.int32)
    )
    assert torch.equal(found_KN.t(), product.unpacked(slice(None), torch.float32))


@storages
@pytest.mark.parametrize(("counts", "bias"), [([0, 3, 0, 17, 1], True), ([40, 0, 0, 0, 90], False)])
def test_products_of_experts_apart_equal_their_reference(
    storage: Storage, counts: list[int], bias: bool
) -> None:
    """Rows after the last expert's are not written."""
    N, K = 70, 160
    products = [stored_product(storage, N, K, seed, bias=bias) for seed in range(len(counts))]
    ends_e = torch.tensor(counts).cumsum(0).int()
    x_NK = normal(sum(counts) + 5, K, dtype=torch.float16)
    with mock.patch.object(torch, "empty", lambda *size, **_: torch.full(size, 7.0).half()):
        found = fused.grouped_products(x_NK, ExpertLinears(products, None), ends_e)
    rows = torch.split(x_NK[:-5], counts)
    expected = torch.cat([product(each) for product, each in zip(products, rows, strict=True)])
    close(found[:-5], expected, torch.float16, 4.0)
    assert (found[-5:] == 7.0).all()


def test_products_of_weights_as_computed_with_equal_their_reference() -> None:
    products = [PackedLinear(normal(33, 48, dtype=torch.float16, seed=n)) for n in range(3)]
    x_NK, ends_e = normal(25, 48, dtype=torch.float16), torch.tensor([4, 4, 25]).int()
    found = fused.grouped_products(x_NK, ExpertLinears(products, None), ends_e)
    expected = torch.cat([products[0](x_NK[:4]), products[2](x_NK[4:])])
    close(found, expected, torch.float16, 8.0)


@kinds
@pytest.mark.parametrize(("T", "K", "D"), [(1, 1, 1), (5, 3, 7), (3, 4, 1030)])
def test_packets_and_their_sums(dtype: torch.dtype, T: int, K: int, D: int) -> None:
    """Rows without an expert of the rank are not copied; sums go to the rows they came from."""
    generator, e = torch.Generator().manual_seed(T), 3
    x_TD, rows_C = normal(T, D, dtype=dtype), torch.randperm(T, generator=generator)
    local_CK = torch.randint(e + 1, (T, K), generator=generator, dtype=torch.int32)
    local_CK[-1] = e
    given = torch.cat([local_CK, local_CK], 1), torch.arange(e, dtype=torch.int32)
    outs = torch.full_like(x_TD, 7.0), torch.empty_like(given[0]), torch.empty_like(given[1])
    fused.pack_rows(x_TD, rows_C, *given, *outs, e)
    assert all(map(torch.equal, outs[1:], given))
    here_C1 = (local_CK < e).any(1, keepdim=True)
    assert torch.equal(outs[0], x_TD[rows_C].where(here_C1, torch.full_like(x_TD, 7.0)))
    total_TD = torch.randn(T, D, generator=generator)
    expected_TD = total_TD.index_add(0, rows_C, x_TD.float())
    fused.add_rows(total_TD, rows_C, x_TD)
    assert torch.equal(total_TD, expected_TD)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_only_counted_rows_are_computed(count: int) -> None:
    """Rows from `count` on hold anything, which no sum may contain."""
    counted, rows_N = torch.tensor([count], dtype=torch.int32), torch.tensor([2, 1, 0, 3, 3, 1])
    y_ND, places_TK = normal(6, 5, dtype=torch.float32), torch.tensor([[5, 0], [1, 4], [3, 2]])
    y_ND[count:] = float("nan")
    found_TD = torch.empty(3, 5)
    fused.weighted_sums(y_ND, places_TK, torch.ones(3, 2), found_TD, counted)
    y_ND.nan_to_num_(0.0)
    assert torch.equal(found_TD, y_ND[places_TK[:, 0]] + y_ND[places_TK[:, 1]])
    x_TD, h_NF2 = normal(4, 5, dtype=torch.float32), normal(6, 8, dtype=torch.float32)
    assert torch.equal(fused.gather_rows(x_TD, rows_N, counted)[:count], x_TD[rows_N][:count])
    assert torch.equal(fused.gated(h_NF2, counted)[:count], fused.gated(h_NF2)[:count])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float32", "float16"])
@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=3),
    st.sampled_from([(2, 3, 8, 8), (1, 5, 24, 24), (2, 1, 16, 16), (1, 20, 20, 16), (1, 3, 11, 6)]),
    st.sampled_from([Seen(0, False, 7), Seen(9, False, 4), Seen(9, True, 16), Seen()]),
    st.booleans(),
)
def test_attention_over_pages_equals_that_of_torch(
    dtype: torch.dtype,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    seen: Seen,
    sinks: bool,
) -> None:
    """heads: KV heads, query heads of each, elements of a key and, if fewer, of a latent's value.
    The interpreter has no products of bfloat16."""
    (G, R, d, v), T = heads, sum(count for count, _ in shapes)
    k_PGd = normal(400, G, d, dtype=dtype)
    v_PGd = k_PGd if v < d else normal(400, G, d, dtype=dtype, seed=1)
    q_THd = normal(T, G * R + 2, d, dtype=dtype, seed=2)[:, 1:-1]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3)).int()
    pages = Pages(torch.stack([order.roll(n) for n in range(len(shapes))]), 4)
    sequences, first = list[SequenceRows](), 0
    for count, start in shapes:
        sequences.append(SequenceRows(first, count, start))
        first += count
    sinks_H = normal(G * R, dtype=dtype, seed=4) if sinks else None
    found, expected = (torch.full((T, G * R, v), 7.0, dtype=dtype) for _ in range(2))
    plan = plan_paged(list(enumerate(sequences)), pages, seen, R, torch.device("cpu"))
    for part in plan.parts:
        given_tensors = q_THd, k_PGd, v_PGd, part
        paged_attention._attend_by_triton(attention, *given_tensors, found, 0.3, sinks_H)
        paged_attention._attend_by_torch(*given_tensors, expected, 0.3, sinks_H)
    close(found, expected, dtype, 2.0)
