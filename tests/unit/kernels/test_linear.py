"""Products, dequantisation, norm, rope, routing and experts against their references.

Kernels for GPUs as far as a CPU runs them; others: tests/gpu/.
"""

import ast
import inspect
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import experts, fused_ops, gpu_experts, row_ops
from kernels import linear as linear_module
from kernels.attention_ops import SequenceRows
from kernels.experts import GroupLimit, RoutingRule, group_by_expert, local_index
from kernels.fused_ops import apply_rope, cos_sin
from kernels.fused_ops import rms_norm_by_torch as rms_norm
from kernels.gpu_experts import Pairs, grouped_products, single_products
from kernels.linear import PackedLinear, has_panels, is_packed, linears, plain_linears
from kernels.paged_attention import packed_part
from kernels.quantization import FP8_BLOCK, dequantize_fp8_blocks, dequantize_mxfp4
from kernels.stored import RawWeight, Storage
from models.decoder.decoder import inverse_frequencies
from models.spec.layer_spec import RopeSpec
from tests.support import kernel_reference as reference
from tests.support.kernel_reference import (
    dequantize_fp8_reference,
    dequantize_mxfp4_reference,
    grouped_experts,
)

STORED = ["mxfp4", "fp8", "int8", "bfloat16"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(130, 96), (40, 48), (512, 512), (1, 7), (96, 192)])
def test_plain_linear_has_bits_of_packed_linear(dtype: torch.dtype, N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(N + K)
    x = torch.randn(80, K, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, K), (N,)))
    packed, plain = PackedLinear(weight, bias), plain_linears(weight[None], bias[None])[0]
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
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 140), st.integers(1, 4), st.integers(1, 12), st.sampled_from(STORED))
def test_stored_weights_give_the_bits_of_unpacked_ones(
    dtype: torch.dtype, N: int, groups: int, T: int, kind: str
) -> None:
    generator, K = torch.Generator().manual_seed(N + T), 32 * groups + (kind != "mxfp4") * (N % 5)
    x = torch.randn(T, K, generator=generator).to(dtype)
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (N, groups, 16), generator=generator, dtype=torch.uint8)
        powers = torch.randint(3, 140, (N, groups), generator=generator, dtype=torch.uint8)
        weight, stored = (
            dequantize_mxfp4(blocks, powers),
            RawWeight(Storage.MXFP4, blocks, powers).packed(),
        )
    elif kind == "fp8":
        codes = torch.randint(0, 126, (N, K), generator=generator, dtype=torch.uint8)
        fp8 = (codes + 128 * (codes % 2)).view(torch.float8_e4m3fn)
        scales = torch.rand(-(-N // FP8_BLOCK), -(-K // FP8_BLOCK), generator=generator)
        weight = dequantize_fp8_blocks(fp8, scales)
        stored = RawWeight(Storage.FP8, fp8, scales.repeat_interleave(FP8_BLOCK, 0)[:N]).packed()
    elif kind == "int8":
        codes = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
        scales = torch.randn(N, -(-K // FP8_BLOCK), generator=generator)
        weight = codes * scales.repeat_interleave(FP8_BLOCK, 1)[:, :K]
        stored = RawWeight(Storage.INT8, codes, scales).packed()
    else:
        dtype, x = torch.float32, x.float()
        weight = torch.randn(N, K, generator=generator).bfloat16()
        stored = RawWeight(Storage.BFLOAT16, weight).packed()
    bias = torch.randn(N, generator=generator).to(dtype)
    found = PackedLinear.of_panels(stored, dtype, bias)(x)
    if has_panels(dtype, torch.device("cpu")):
        assert torch.equal(found, PackedLinear(weight.to(dtype), bias)(x))
    else:
        torch.testing.assert_close(found, PackedLinear(weight.to(dtype), bias)(x))


@pytest.mark.parametrize(
    ("onednn_s", "depends", "expected"),
    [([1.0] * 9, False, True), ([1.0] * 8 + [2.0], False, False), ([1.0] * 9, True, False)],
)
def test_onednn_must_be_faster_for_every_number_of_rows_and_keep_bits(
    monkeypatch: pytest.MonkeyPatch, onednn_s: list[float], depends: bool, expected: bool
) -> None:
    times = iter((onednn_s, [2.0] * 9))
    monkeypatch.setattr(linear_module, "times_s", lambda product, x: next(times))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    found = linear_module.is_better(lambda x: x + depends * (len(x) == 7), torch.neg, x)
    assert found is expected


def test_choice_of_onednn_is_measured_once_and_only_with_matrix_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, cpu = torch.bfloat16, torch.device("cpu")
    answers: list[bool] = []
    monkeypatch.setattr(linear_module, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(linear_module, "is_better", lambda *_: answers.pop())
    monkeypatch.setattr(linear_module, "_reordered", lambda weight_NK: weight_NK)  # without AVX-512
    linear_module.uses_matrix_units.cache_clear()
    try:
        for has_units, measured, expected in (
            (False, [], False),
            (True, [True], True),
            (True, [], True),  # another process reads what the first one kept
            (False, [], False),
        ):
            answers[:] = measured
            linear_module.uses_matrix_units.cache_clear()
            monkeypatch.setattr(linear_module, "HAS_MATRIX_UNITS", has_units)
            assert has_panels(dtype, cpu) is not expected
            assert not answers, "measured"
        linear_module.uses_matrix_units.cache_clear()
        (tmp_path / linear_module.CHOICE_FILE).unlink()
        monkeypatch.setattr(linear_module, "HAS_MATRIX_UNITS", True)
        answers[:] = [False]
        assert has_panels(dtype, cpu)
        assert linear_module.decided(tmp_path) is False
        assert not linear_module.decide(None, answers.pop)
    finally:
        linear_module.uses_matrix_units.cache_clear()


def test_scales_and_weights_that_cannot_be_unpacked_are_refused() -> None:
    codes, fp8 = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 8).to(torch.float8_e4m3fn)
    for storage, weight, scales in (
        (Storage.FP8, fp8, (65.0, 1e-31, float("nan"), float("inf"))),
        (Storage.INT8, codes, (1e31, 1e-31, float("nan"))),
    ):
        for scale in scales:
            with pytest.raises(ValueError, match="scale"):
                RawWeight(storage, weight, torch.tensor([[1.0], [scale]])).packed()
    fp8 = torch.full((1, 4), float("nan")).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="not a number"):
        RawWeight(Storage.FP8, fp8, torch.ones(1, 1)).packed()
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    for exponent in (2, 253):
        with pytest.raises(ValueError, match="exponent"):
            RawWeight(Storage.MXFP4, blocks, torch.tensor([[exponent]])).packed()


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


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 2e-6, 1e-6), (torch.bfloat16, 0.0, 2**-7)]
)
def test_rms_norm_equals_reference_and_keeps_input(
    dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x = (torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    weight = torch.rand(24, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, normed = x.clone(), rms_norm(x, weight, 1e-5)
    assert normed.dtype is dtype
    assert torch.equal(x, before)
    expected = reference.rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, atol=atol, rtol=rtol)


def test_rms_norm_with_one_rounding_equals_rounded_reference() -> None:
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = torch.rand(24, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = reference.rms_norm_reference(x, weight, 1e-6).float().to(torch.bfloat16)
    once = rms_norm(x, weight, 1e-6, round_once=True)
    assert (once != expected).float().mean() < 0.001  # float32 before the rounding, not float64
    assert (rms_norm(x, weight, 1e-6) != expected).float().mean() > 0.1


def test_rope_equals_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x_THd = torch.randn(7, 5, 12, generator=generator)
    positions_T = torch.tensor([0, 1, 2, 40, 41, 7, 300])
    inv_freq = inverse_frequencies(RopeSpec(theta=10_000.0), 12)
    cos, sin = cos_sin(positions_T, inv_freq, factor=1.0, dtype=torch.float32)
    expected = reference.rope_reference(x_THd, positions_T, inv_freq)
    difference = apply_rope(x_THd, cos, sin).double() - expected
    assert difference.abs().max() < 1e-4  # float32 angles of 300 radians
    assert difference[:3].abs().max() < 1e-6


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_routing_equals_reference(
    T: int, groups: int, size: int, normalize: bool, data: st.DataObject
) -> None:
    """In compiled code, as torch's operations compute it, and with given experts."""
    kept, best, sigmoid = (
        data.draw(st.integers(*each)) for each in ((1, groups), (1, min(2, size)), (0, 1))
    )
    top_k, E = data.draw(st.integers(1, kept * size)), groups * size
    generator = torch.Generator().manual_seed(T * 1000 + groups * 100 + size * 10 + kept)
    logits_TE = torch.randn(T, E, generator=generator)
    bias_E = torch.randn(E, generator=generator) if best == 2 else None
    rule = RoutingRule(
        E, top_k, normalize=normalize, sigmoid=bool(sigmoid), scale=1.5, bias_E=bias_E,
        limit=GroupLimit(groups, kept, best),
    )  # fmt: skip
    ids_TK, weights_TK = rule.choose(logits_TE)
    assert (ids_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert torch.equal(rule.weigh(logits_TE, ids_TK), weights_TK)
    with mock.patch.object(row_ops, "is_compiled", return_value=False):
        by_torch = rule.choose(logits_TE)
    assert torch.equal(by_torch[0], ids_TK)
    torch.testing.assert_close(by_torch[1], weights_TK)
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    for ids, weights, scores in zip(ids_TK, weights_TK, scores_TE, strict=True):
        expected = reference.limited_top_k_reference(
            scores.tolist(),
            top_k,
            groups=groups,
            kept=kept,
            best=best,
            bias_E=[0.0] * groups * size if bias_E is None else bias_E.tolist(),
            normalize=normalize,
        )
        found = dict(zip(ids.tolist(), (weights / 1.5).tolist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-6)


@DTYPES
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(2, 12), st.sampled_from([0.01, 0.1, 0.5]))
def test_sparsemixer_in_compiled_code_equals_that_of_torch(
    dtype: torch.dtype, T: int, E: int, jitter: float
) -> None:
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(T + 10 * E)).to(dtype)
    rule = RoutingRule(E, 2, normalize=False, jitter=jitter)
    ids_TK, weights_TK = rule.choose(logits_TE)
    assert torch.equal(rule.weigh(logits_TE, ids_TK), weights_TK)
    with mock.patch.object(row_ops, "is_compiled", return_value=False):
        torch.testing.assert_close(rule.weigh(logits_TE, ids_TK), weights_TK)
        by_torch = rule.choose(logits_TE)
    chosen_TK = logits_TE.gather(1, ids_TK)
    assert torch.equal(logits_TE.gather(1, by_torch[0]), chosen_TK), "equal logits in any order"


@DTYPES
@pytest.mark.parametrize("D", [5, 64, 100])
def test_layer_norm_equals_that_of_torch(dtype: torch.dtype, D: int) -> None:
    generator = torch.Generator().manual_seed(D)
    x_TD = (3 + torch.randn(7, D, generator=generator)).to(dtype)
    weight, bias = (torch.randn(D, generator=generator).to(dtype) for _ in range(2))
    found_TD = fused_ops.layer_norm(x_TD, torch.cat((weight, bias)), 1e-5)
    expected_TD = torch.nn.functional.layer_norm(x_TD, (D,), weight, bias, 1e-5)
    torch.testing.assert_close(found_TD, expected_TD)
    assert torch.equal(
        fused_ops.layer_norm(x_TD[3:], torch.cat((weight, bias)), 1e-5), found_TD[3:]
    )


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.sampled_from([1, 5, 512]),
    st.none() | st.floats(0.1, 8.0),
    st.data(),
)
def test_local_experts_and_experts_on_gpu_equal_reference(
    T: int, E: int, run_pairs: int, limit: float | None, data: st.DataObject
) -> None:
    """limit: of clamped experts with biases; None: without."""
    top_k = data.draw(st.integers(1, E))
    held = data.draw(st.permutations(range(E)))[: data.draw(st.integers(1, E) | st.just(E))]
    generator = torch.Generator().manual_seed(T * 100 + E * 10 + top_k)
    D, F, e = 6, 5, len(held)
    x_TD = torch.randn(T, D, generator=generator)
    logits_TE = torch.randn(T, E, generator=generator)
    ids_TK, weights_TK = RoutingRule(E, top_k, normalize=True).choose(logits_TE)
    gate_up, down = (torch.randn(e, *s, generator=generator) for s in ((2 * F, D), (D, F)))
    rows_N, weights_N, counts = group_by_expert(ids_TK, weights_TK, local_index(held, E), e)
    pairs = [
        (t, held.index(expert), weight)
        for t in range(T)
        for expert, weight in zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True)
        if expert in held
    ]
    linears_e, clamped, biases = (linears(gate_up), linears(down)), None, None
    if limit is not None:
        clamped = experts.ClampedGate(alpha=1.7, limit=limit)
        biases = (
            torch.randn(e, 2 * F, generator=generator),
            torch.randn(e, D, generator=generator),
        )
        linears_e = linears(gate_up, biases[0]), linears(down, biases[1])
    expected = reference.experts_reference(x_TD, gate_up, down, pairs, clamped, biases)
    before = x_TD.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "RUN_PAIRS", run_pairs)
        out_TD = grouped_experts(x_TD, *linears_e, rows_N, weights_N, counts, clamped)
        found = [out_TD]
        if e == E:
            patch.setattr(gpu_experts, "PIECE_TOKENS", run_pairs)
            local_TK = torch.tensor([held.index(expert) for expert in range(E)])[ids_TK]
            gpu_TD = gpu_experts.gpu_experts(x_TD, local_TK, weights_TK, *linears_e, clamped)
            found.append(gpu_TD)
    assert sum(counts) == len(pairs)
    assert torch.equal(x_TD, before)
    for each_TD in found:
        assert each_TD.dtype is torch.float32
        torch.testing.assert_close(each_TD.double(), expected, atol=3e-5, rtol=1e-5)


def test_pairs_of_one_expert_keep_token_order() -> None:
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    weights_TK = torch.arange(8, dtype=torch.float32).view(4, 2)
    rows, weights, counts = group_by_expert(ids_TK, weights_TK, local_index([2, 0], 3), 2)
    assert rows.tolist() == [0, 2, 3, 0, 1, 3]
    assert weights.tolist() == [0, 4, 7, 1, 2, 6]
    assert counts == [3, 3]


CPU = torch.device("cpu")


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


def test_packed_part_has_bounds_of_sequences() -> None:
    rows = [SequenceRows(0, 3, 0), SequenceRows(3, 0, 5), SequenceRows(3, 2, 0)]
    part = packed_part(rows, 16, CPU)
    assert part.ends.tolist() == [0, 3, 5]
    assert (part.longest, part.window) == (3, 16)


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
