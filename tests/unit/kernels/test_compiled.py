"""Compiled kernels equal their references, and a row's bits do not depend on other rows."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import compiled, delta_rule, row_ops, thread_pool
from kernels.attention import plan_attention
from kernels.attention_ops import SequenceRows
from kernels.compiled import (
    bits_of,
    compile_on_disk,
    exp,
    from_bfloat16,
    processor_has,
    to_bfloat16,
)
from kernels.experts import ClampedGate, expert_steps
from kernels.linear import ExpertLinears, PackedLinear, linear, linears
from kernels.steps import run_to_end
from tests.support.kernel_reference import delta_net_reference

DTYPES = (torch.float32, torch.bfloat16)
some = settings(deadline=None, max_examples=40)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@some
@given(st.integers(0, 150), st.integers(1, 70), st.integers(1, 70), st.booleans())
@example(130, 33, 512, True)
@example(300, 130, 96, False)
def test_product_equals_float64_whatever_the_other_rows(
    dtype: torch.dtype, T: int, N: int, K: int, biased: bool
) -> None:
    x, weight, bias = (
        numbers(*shape, seed=T + N + K, dtype=dtype) for shape in ((T, K), (N, K), (N,))
    )
    product = PackedLinear(weight, bias if biased else None)
    whole = product(x)
    assert whole.dtype is dtype
    expected = x.double() @ weight.double().t() + bias.double() * biased
    atol, rtol = (3e-5, 1e-5) if dtype is torch.float32 else (1e-4, 2**-8)
    torch.testing.assert_close(whole.double(), expected, atol=atol, rtol=rtol)
    if not biased:
        torch.testing.assert_close(linear(x, weight), whole)
    for rows in {1, 2, 3, 5, 8, T // 2 + 1, T}:
        first = max(0, T - rows)
        assert torch.equal(product(x[first:]), whole[first:])
        assert torch.equal(product(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamped", [None, ClampedGate(1.7, 2.0)])
@pytest.mark.parametrize(("D", "F"), [(48, 20), (16, 5)])
def test_experts_of_a_token_keep_their_bits_in_any_batch(
    dtype: torch.dtype, clamped: ClampedGate | None, D: int, F: int
) -> None:
    T, E, K = 900, 6, 2
    gate_up, down = (
        linears(numbers(E, *shape, seed=1, dtype=dtype), numbers(E, shape[0], seed=2, dtype=dtype))
        for shape in ((2 * F, D), (D, F))
    )
    x_TD = numbers(T, D, seed=3, dtype=dtype)
    ids_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    weights_TK = torch.rand(T, K)

    def run(tokens: slice) -> Tensor:
        ids_N, order_N = torch.sort(ids_TK[tokens].flatten(), stable=True)
        counts = torch.bincount(ids_N, minlength=E).tolist()
        weights_N = weights_TK[tokens].flatten()[order_N]
        steps = expert_steps(x_TD[tokens], gate_up, down, order_N // K, weights_N, counts, clamped)
        return run_to_end(steps)

    whole = run(slice(0, T))
    for first, last in ((0, 1), (7, 9), (100, 133), (0, 450)):
        assert torch.equal(run(slice(first, last)), whole[first:last])


@pytest.mark.parametrize(
    ("rows", "counts"), [([0, 3], [1, 1]), ([0, -1], [2, 0]), ([0], [1, 1]), ([0, 1], [3, -1])]
)
def test_pairs_outside_of_the_rows_are_refused(rows: list[int], counts: list[int]) -> None:
    gate_up, down = (linears(numbers(2, *shape, seed=1)) for shape in ((8, 16), (16, 4)))
    pairs = torch.tensor(rows), torch.ones(len(rows)), counts
    with pytest.raises(IndexError):
        run_to_end(expert_steps(numbers(3, 16, seed=2), gate_up, down, *pairs))


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, product = numbers(9, 640, seed=0), PackedLinear(numbers(5000, 640, seed=1))
    alone = product(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(200):
        assert torch.equal(product(x), alone)


def test_threads_serve_one_of_several_callers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, product = numbers(2, 640, seed=0), PackedLinear(numbers(5000, 640, seed=1))
    alone = product(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda _: product(x), range(400)))
    assert all(torch.equal(each, alone) for each in found)


def test_threads_keep_the_state_of_their_pool() -> None:
    pool = thread_pool._Pool(2)
    left = weakref.ref(pool)
    del pool
    gc.collect()
    assert left() is not None, "the thread reads it"


def test_exp_and_bfloat16_equal_references() -> None:
    values = np.linspace(-86, 88, 20_001, dtype=np.float32)
    found = np.array([exp(value) for value in values])
    np.testing.assert_allclose(found, np.exp(values.astype(np.float64)), rtol=3e-7)
    special = torch.tensor([0.0, -0.0, 1.0, 3.0e38, float("inf"), float("-inf"), float("nan")])
    for value in [*special, *numbers(500, seed=0)]:
        bits = int(to_bfloat16(np.float32(value.item())))
        rounded = torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)
        assert torch.equal(
            rounded.float().nan_to_num(7), value.bfloat16().float().nan_to_num(7).view(1)
        )
        assert (
            np.float32(from_bfloat16(np.uint16(bits))).tobytes()
            == rounded.float().numpy().tobytes()
        )


def test_long_contexts_yield_between_sequences() -> None:
    keys = [SequenceRows(n, 1, 9_999, slice(0, 10_000)) for n in range(3)]
    plan = plan_attention(keys, window=None)
    assert plan.rows is not None
    assert plan.rows.steps == ((0, 1), (1, 2), (2, 3))


def test_rows_are_written_to_their_slots() -> None:
    for dtype in DTYPES:
        pool, x = torch.zeros(9, 2, 3, dtype=dtype), numbers(2, 4, 3, seed=0, dtype=dtype)[:, 1:3]
        slots = torch.tensor([7, 2])
        row_ops.write_rows(
            x.element_size(), x.data_ptr(), x.stride(0), slots.data_ptr(), pool.data_ptr(), 2, 6
        )
        expected = torch.zeros_like(pool).index_copy(0, slots, x)
        assert torch.equal(pool, expected)


def test_code_that_cannot_be_kept_is_compiled_anyway(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[None] = []

    def call_all() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise OSError("no space left on device")

    compile_on_disk(call_all)
    assert len(calls) == 2
    assert "no space left" in caplog.text


def test_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    assert compiled._is_ours(tmp_path)
    tmp_path.chmod(0o777)
    assert not compiled._is_ours(tmp_path)


PARTS_OF_EACH_ORDER = """
import importlib, sys
for first in ("panels", "attention_ops", "delta_rule"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        del sys.modules[name]
    for name in (first, "linear", "thread_pool"):
        module = importlib.import_module(f"kernels.{name}")
    print({n: p.py_func.__name__ for n, p in sorted(module.PARTS.items())})
"""


@pytest.mark.long
def test_numbers_of_parts_do_not_depend_on_what_is_imported_first() -> None:
    """Code that one process keeps on disk calls parts by number in another one."""
    found = subprocess.check_output([sys.executable, "-c", PARTS_OF_EACH_ORDER], text=True)
    assert len(found.splitlines()) == 3
    assert len(set(found.splitlines())) == 1


def test_folder_depends_on_each_file_with_compiled_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folders = tmp_path / "elsewhere.py", set()
    monkeypatch.setattr(compiled, "_functions", list(compiled._functions))
    for value in (1, 2):
        path.write_text(f"def function(): return {value}", encoding="utf-8")
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), scope)
        compiled.compiled(scope["function"])
        folder = compiled.code_folder()
        assert folder is not None
        folder.rmdir()
        folders.add(folder)
    assert len(folders) == 2


def test_code_that_no_start_has_used_for_long_is_removed(tmp_path: Path) -> None:
    used, old, new = (tmp_path / f"compiled-{name}" for name in ("used", "old", "new"))
    for folder in (used, old, new):
        folder.mkdir()
    for folder in (used, old):
        os.utime(folder, (0, 0))
    compiled._remove_unused(used)
    assert sorted(tmp_path.iterdir()) == [new, used]
    assert used.stat().st_mtime > 0


ALONE = """
import kernels.linear
from kernels.thread_pool import PARTS, PartNumber
kernels.linear.compile_kernels = lambda: None  # products alone: a fifth of the time
for number in set(PARTS) - {PartNumber.MULTIPLY}:
    del PARTS[number]
"""
CODE = """
import torch
from kernels.linear import PackedLinear
from kernels.quantization import dequantize_fp8_blocks, dequantize_int8, dequantize_mxfp4
from kernels.stored import RawWeight, Storage
torch.manual_seed(0)
x, weight = torch.randn(13, 70), torch.randn(40, 70)
for dtype in (torch.float32, torch.bfloat16):
    product = PackedLinear(weight.to(dtype))
    out = product(x.to(dtype))
    assert torch.equal(product(x[:1].to(dtype)), out[:1])
    torch.testing.assert_close(out.float(), x @ weight.t(), atol=0.2, rtol=0.02)
    print(out.float().sum().item())
    blocks, powers = torch.arange(256).repeat(4).view(32, 2, 16), torch.arange(90, 154).view(32, 2)
    blocks, powers = blocks.to(torch.uint8), powers.to(torch.uint8)
    codes = torch.arange(126, dtype=torch.uint8).repeat(20).view(40, 63)
    int8, fp8 = codes.view(torch.int8), (codes + 128 * (codes % 2)).view(torch.float8_e4m3fn)
    scales = torch.full((40, 1), 0.3)
    for stored, plain in (
        (RawWeight(Storage.MXFP4, blocks, powers).packed(), dequantize_mxfp4(blocks, powers)),
        (RawWeight(Storage.FP8, fp8, scales).packed(), dequantize_fp8_blocks(fp8, scales[:1])),
        (RawWeight(Storage.INT8, int8, scales).packed(), dequantize_int8(int8, scales)),
    ):
        some = x[:, : plain.shape[1]].to(dtype)
        for rows in (1, 3, 13):
            unpacked = PackedLinear(plain.to(dtype))(some[:rows])
            assert torch.equal(PackedLinear.of_panels(stored, dtype, None)(some[:rows]), unpacked)
"""


@pytest.mark.long
@pytest.mark.skipif(not processor_has("avx512f"), reason="no vectors wider than AVX2's here")
def test_half_as_wide_vectors_give_the_same_float32_bits() -> None:
    half = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse2,+ssse3,+sse4.1,+sse4.2"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": half}
    found = subprocess.check_output(
        [sys.executable, "-c", ALONE + CODE], env=environment, text=True
    )
    here: list[float] = []
    exec(CODE, {"print": here.append})
    assert found.split() == [str(number) for number in here]


def test_experts_of_different_layers_share_products() -> None:
    products = linears(numbers(3, 8, 4, seed=0))
    part = ExpertLinears(list(products)[1:], None)
    assert part.addresses.tolist() == products.addresses[1:].tolist()


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 20), st.integers(1, 20)),
    st.integers(2, 5),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_delta_net_equals_reference_for_several_sequences(
    dtype: torch.dtype,
    by_row: bool,
    sizes: tuple[int, int, int, int],
    taps: int,
    lengths: list[int],
) -> None:
    (G, R, K, V), T, N = sizes, sum(lengths), len(lengths)
    R = 1 if by_row else R
    w, eps, A = 2 * K + R * V, 1e-3, K if by_row else R
    x_TP, conv = (
        numbers(*shape, seed=T + K, dtype=dtype)
        for shape in ((T, G * (w + R * V + R + A)), (G, taps, w))
    )
    rates, biases, states = (numbers(*shape, seed=V).abs() for shape in
                             ((G, R), (G, A), (N, G, R, K, V)))  # fmt: skip
    norm, inputs = (numbers(*shape, seed=V, dtype=dtype) for shape in
                    ((V,), (N, G, taps - 1, w)))  # fmt: skip
    addresses = (tensor.data_ptr() for tensor in (conv, rates, biases, norm))
    call_sizes = dtype is torch.float32, G, R, K, V, taps
    fields = np.array((*call_sizes, *addresses, bits_of(eps), by_row), np.int64)
    firsts = np.cumsum([0, *lengths])[:-1]
    kept = inputs.double(), states.double()
    entries = np.array([
        (first, count, inputs[n].data_ptr(), states[n].data_ptr())
        for n, (first, count) in enumerate(zip(firsts, lengths, strict=True))
    ], np.int64)  # fmt: skip
    found = torch.empty((T, G, R, V), dtype=dtype)
    call = fields.ctypes.data, x_TP.data_ptr(), entries.ctypes.data, N, G, found.data_ptr()
    delta_rule.advance(thread_pool.shared_pool(), *call)
    expected = torch.cat([
        delta_net_reference(rows, conv, (rates, biases), norm, (kept[0][n], kept[1][n]), eps)
        for n, rows in enumerate(torch.split(x_TP, lengths))
    ])  # fmt: skip
    close = float(expected.abs().max()) * (1e-4 if dtype is torch.float32 else 0.1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=close)
    torch.testing.assert_close(inputs.double(), kept[0], rtol=0, atol=0)
    close = float(kept[1].abs().max()) * (1e-5 if dtype is torch.float32 else 0.05)
    torch.testing.assert_close(states.double(), kept[1], rtol=0, atol=close)
