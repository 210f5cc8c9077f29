"""Ragged paged attention, also over latents, against its references."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import attention_ops, latent_attention
from kernels.attention import plan_attention, plan_on_device
from kernels.attention_ops import SequenceRows
from kernels.latent_attention import LatentUp
from kernels.linear import compile_kernels
from kernels.pages import Pages, Seen
from tests.support.kernel_reference import (
    attention_reference,
    latent_attention_reference,
    layout,
    ragged_attention,
    ragged_latent_attention,
)

SHAPE = st.tuples(st.integers(1, 9), st.integers(0, 11))  # new tokens, cached ones
DECODE = st.tuples(st.just(1), st.integers(0, 199))
# KV heads, query heads of each, elements of a key and of a value.
HEADS = [(2, 1, 8, 8), (2, 2, 8, 5), (2, 3, 8, 11), (1, 8, 24, 24), (3, 1, 5, 5), (2, 2, 64, 64),
         (1, 4, 137, 137), (1, 16, 137, 137)]  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _code_from_disk() -> None:
    compile_kernels()


def run_ragged(
    shapes: list[tuple[int, int]],
    seen: Seen,
    *,
    heads: tuple[int, int, int, int] = (2, 2, 8, 8),
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    is_compiled: bool = False,
) -> float:
    """Return the largest difference to the reference over (new, cached) tokens.

    In compiled code a sequence has equal bits whatever the others.
    """
    generator = torch.Generator().manual_seed(len(shapes) * 31 + shapes[0][0])
    (G, share, d, v), scale, laid = heads, 0.3, layout(shapes)
    k_pool, v_pool = (
        torch.randn(laid.pool_slots, G, size, generator=generator).to(dtype) for size in (d, v)
    )
    T = sum(count for count, _ in shapes)
    q_THd = torch.randn(T, G * share, d, generator=generator).to(dtype)
    if is_compiled:
        plan = plan_attention(laid.sequences, window=seen.window or None, group=share)
    else:
        kind: Any = {"group": share, "packed": False, "expands": False}
        plan = plan_on_device(laid.sequences, laid.pages, seen, CPU, **kind)
    sinks_H = torch.randn(G * share, generator=generator).to(dtype) if sinks else None
    fresh = (k_pool[laid.new_slots], v_pool[laid.new_slots])
    given: Any = {"scale": scale, "sinks_H": sinks_H}
    out_THd = ragged_attention(q_THd, *fresh, k_pool, v_pool, plan, **given)
    worst = 0.0
    for seq, slots_S in zip(laid.sequences, laid.slots, strict=True):
        if is_compiled:
            rows, one = slice(seq.first, seq.first + seq.count), dataclasses.replace(seq, first=0)
            plan = plan_attention([one], window=seen.window or None, group=share)
            own = q_THd[rows], *(each[rows] for each in fresh), k_pool, v_pool, plan
            assert torch.equal(ragged_attention(*own, **given), out_THd[rows])
        for row in range(seq.count):
            position = seen.window if seen.chunked else 0
            low = (seq.start + row) // position * position if position else 0
            expected = attention_reference(
                q_THd[seq.first + row][None],
                k_pool[slots_S[low:]],
                v_pool[slots_S[low:]],
                start=seq.start + row - low,
                scale=scale,
                window=seen.window or None,
                sinks_H=sinks_H,
            )
            worst = max(worst, (out_THd[seq.first + row] - expected[0]).abs().max().item())
    return worst


@settings(deadline=None, max_examples=200)
@given(
    st.lists(SHAPE | DECODE, min_size=1, max_size=9),
    st.just(0) | st.sampled_from([*range(1, 26), 50, 64]),
    st.sampled_from(HEADS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([0, 1, 5, 256]),
    st.booleans(),
    st.sampled_from([3, 7, 512]),
)
@example([(1, 39)], 0, (1, 4, 137, 137), torch.float32, False, 256, False, 512)
@example([(1, 39)], 0, (1, 16, 137, 137), torch.float32, False, 256, False, 512)
def test_any_ragged_batch_equals_reference(
    shapes: list[tuple[int, int]],
    window: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    sinks: bool,
    queries: int,
    chunked: bool,
    keys: int,
) -> None:
    """queries: of a compiled entry; 0: on a device. keys: of a split there."""
    seen = Seen(window, chunked and window > 0 and not queries, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_ops, "_ENTRY_QUERIES", queries or 256)
        kinds: Any = {"heads": heads, "dtype": dtype, "sinks": sinks}
        worst = run_ragged(shapes, seen, **kinds, is_compiled=queries > 0)
    assert worst < (3e-2 if dtype is torch.bfloat16 else 2e-6 if heads[2] == 8 else 1e-5)


def test_bits_of_a_row_in_decode_depend_on_its_context_only() -> None:
    generator = torch.Generator().manual_seed(3)
    laid = layout([(1, 40), (1, 1), (1, 9), (3, 8)])
    pool = torch.randn(laid.pool_slots, 2, 8, generator=generator)
    q_THd = torch.randn(6, 4, 8, generator=generator)
    kind: Any = {"group": 2, "packed": False, "expands": False}

    def attended(rows: list[int]) -> Tensor:
        counts = [laid.sequences[row].count for row in rows]
        firsts = itertools.accumulate(counts, initial=0)
        chosen = [
            SequenceRows(first, laid.sequences[row].count, laid.sequences[row].start)
            for first, row in zip(firsts, rows, strict=False)
        ]
        pages = Pages(laid.pages.blocks_BW[rows], 4)
        plan = plan_on_device(chosen, pages, Seen(split_keys=8), CPU, **kind)
        q = torch.cat(
            [q_THd[s.first : s.first + s.count] for s in map(laid.sequences.__getitem__, rows)]
        )
        return ragged_attention(q, pool[: len(q)], pool[: len(q)], pool, pool, plan, scale=0.3)

    alone, together = attended([0]), attended([3, 2, 0, 1])
    assert torch.equal(alone[0], together[4])


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("start", [0, 4096])
@pytest.mark.parametrize("window", [0, 128])
def test_sinks_of_long_prompt_allocate_at_most_query_size(window: int, start: int) -> None:
    """The meta device allocates like a GPU, with gpt-oss's heads."""
    T, H, G, d = 2048, 64, 8, 64
    meta = torch.device("meta")
    seq, pages = SequenceRows(0, T, start), Pages(torch.empty(1, 768, device=meta), 16)
    q_THd = torch.empty(T, H, d, device=meta, dtype=torch.bfloat16)
    pool_PGd = torch.empty(start + T, G, d, device=meta, dtype=torch.bfloat16)
    fresh_TGd, sinks_H = pool_PGd[:T], torch.empty(H, device=meta)
    kind: Any = {"group": H // G, "packed": False, "expands": False}
    with _Largest() as made:  # type: ignore[no-untyped-call]
        plan = plan_on_device([seq], pages, Seen(window), meta, **kind)
        ragged_attention(
            q_THd, fresh_TGd, fresh_TGd, pool_PGd, pool_PGd, plan, scale=0.1, sinks_H=sinks_H
        )
    assert made.elements == q_THd.numel()  # the result


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bfloat16_error_stays_within_rounding(is_compiled: bool) -> None:
    shapes = [(40, 9), (1, 9), (200, 300)]
    assert run_ragged(shapes, Seen(), dtype=torch.bfloat16, is_compiled=is_compiled) < 3e-2


@settings(deadline=None, max_examples=60)
@given(
    st.lists(SHAPE, min_size=1, max_size=5), st.integers(1, 3), st.sampled_from([None, False, True])
)
def test_any_ragged_batch_of_latents_equals_reference(
    shapes: list[tuple[int, int]], H: int, absorb: bool | None
) -> None:
    """absorb: of chunks on the CPU; None: on a device."""
    generator, laid = torch.Generator().manual_seed(len(shapes) * 31 + shapes[0][0]), layout(shapes)
    n, p, v, r, scale = 5, 4, 3, 6, 0.4
    pool = torch.randn(laid.pool_slots, 1, r + p, generator=generator)
    weight = torch.randn(H, n + v, r, generator=generator)
    q_THd = torch.randn(sum(count for count, _ in shapes), H, n + p, generator=generator)
    if absorb is None:
        kind: Any = {"group": H, "packed": False, "expands": True}
        plan = plan_on_device(laid.sequences, laid.pages, Seen(split_keys=5), CPU, **kind)
    else:
        plan = plan_attention(laid.sequences, window=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "_absorbs", lambda *_: absorb)
        out_THv = ragged_latent_attention(
            q_THd, pool[laid.new_slots], pool, LatentUp(weight, n), plan, scale=scale
        )
    for seq, own in zip(laid.sequences, laid.slots, strict=True):
        rows = slice(seq.first, seq.first + seq.count)
        expected = latent_attention_reference(
            q_THd[rows], pool[own, 0], weight, nope_dim=n, start=seq.start, scale=scale
        )
        torch.testing.assert_close(out_THv[rows].double(), expected, atol=1e-5, rtol=1e-5)
