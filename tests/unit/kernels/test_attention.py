"""Ragged paged attention, also over latents, against its references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import attention, latent_attention, packed_attention
from kernels.attention import plan_attention
from kernels.latent_attention import LatentUp
from kernels.packed_attention import SequenceRows
from kernels.sinks import attend_with_sinks
from tests.support.kernel_reference import (
    attention_reference,
    latent_attention_reference,
    ragged_attention,
    ragged_latent_attention,
)

SHAPE = st.tuples(st.integers(1, 9), st.integers(0, 11), st.booleans())  # count, start, consecutive


def run_ragged(
    shapes: list[tuple[int, int, bool]],
    *,
    window: int | None,
    share: int = 2,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    short_together: bool = False,
    is_compiled: bool = False,
) -> float:
    """Return the largest difference to the reference over (count, start, consecutive)."""
    generator = torch.Generator().manual_seed(len(shapes) * 31 + shapes[0][0])
    G, d, scale = 2, 8, 0.3
    T = sum(count for count, _, _ in shapes)
    total = sum(count + start for count, start, _ in shapes)
    k_pool, v_pool = (
        torch.randn(total + 3, G, size, generator=generator).to(dtype) for size in (d, value_dim)
    )
    q_THd = torch.randn(T, G * share, d, generator=generator).to(dtype)
    shuffled = torch.randperm(total, generator=generator) + 3
    sequences, new_slots, used, first = [], [], 0, 0
    for count, start, consecutive in shapes:
        slots_S = shuffled[used : used + start + count]
        keys: slice | torch.Tensor = slots_S
        if consecutive and len(shapes) == 1:
            slots_S = torch.arange(3, 3 + start + count)
            keys = slice(3, 3 + start + count)
        sequences.append(SequenceRows(first, count, start, keys))
        new_slots.append(slots_S[start:])
        first, used = first + count, used + start + count
    slots_T = torch.cat(new_slots)
    device = torch.device("cpu")
    plan = plan_attention(
        sequences,
        window=window,
        dtype=dtype,
        device=device,
        group=share if is_compiled else 0,
        short_together=short_together,
    )
    sinks_H = torch.randn(G * share, generator=generator) if sinks else None
    k_TGd, v_TGd = k_pool[slots_T], v_pool[slots_T]
    out_THd = ragged_attention(
        q_THd, k_TGd, v_TGd, k_pool, v_pool, plan, scale=scale, sinks_H=sinks_H
    )
    worst = 0.0
    for seq in sequences:
        rows = slice(seq.first, seq.first + seq.count)
        expected = attention_reference(
            q_THd[rows],
            k_pool[seq.slots_S],
            v_pool[seq.slots_S],
            start=seq.start,
            scale=scale,
            window=window,
            sinks_H=sinks_H,
        )
        worst = max(worst, (out_THd[rows] - expected).abs().max().item())
    return worst


@settings(deadline=None, max_examples=200)
@given(
    st.lists(SHAPE, min_size=1, max_size=9),
    st.none() | st.integers(1, 25),
    st.integers(1, 3),
    st.sampled_from(["plain", "sinks", "groups", "filled groups", "tiles"]),
    st.sampled_from([0, 1, 5, 256]),
    st.sampled_from([8, 8, 5, 11]),
)
def test_any_ragged_batch_equals_reference(
    shapes: list[tuple[int, int, bool]],
    window: int | None,
    share: int,
    way: str,
    queries: int,
    value_dim: int,
) -> None:
    """queries: of a compiled entry; 0: torch."""
    grouped, sinks = "groups" in way, way == "sinks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "_MIN_FILL", 0.75 if way == "filled groups" else 0.1)
        if way == "tiles":
            patch.setattr(attention, "_TILE_ROWS", 4)
        patch.setattr(attention, "_ENTRY_QUERIES", queries or 256)
        worst = run_ragged(
            shapes,
            window=window,
            share=share,
            value_dim=8 if grouped else value_dim,
            sinks=sinks,
            short_together=grouped,
            is_compiled=queries > 0,
        )
    assert worst < 2e-6


@pytest.mark.parametrize("scores", [1, 4 * 7 * 9, 1 << 25])
@pytest.mark.parametrize("causal", [True, False])
def test_sinks_in_pieces_equal_reference(
    causal: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal calls are those of a GPU for new prompts."""
    monkeypatch.setattr("kernels.sinks._ROWS", 7)
    monkeypatch.setattr("kernels.sinks._LEAST_KEYS", 3)
    monkeypatch.setattr("kernels.sinks._SCORES", scores)
    generator = torch.Generator().manual_seed(5)
    q_THd = torch.randn(40, 4, 8, generator=generator)
    k_TGd, v_TGd = (torch.randn(40, 2, 8, generator=generator) for _ in "kv")
    sinks_H = torch.randn(4, generator=generator)
    window = None if causal else 11
    hidden = torch.ones(40, 40).tril(-11) + torch.ones(40, 40).triu(1) > 0
    mask = None if causal else torch.zeros(40, 40).masked_fill_(hidden, float("-inf"))
    found = attend_with_sinks(
        q_THd.view(40, 2, 2, 8).permute(1, 2, 0, 3),
        k_TGd.transpose(0, 1),
        v_TGd.transpose(0, 1),
        sinks_H.view(2, 2),
        mask=mask,
        causal=causal,
        scale=0.3,
    )
    expected = attention_reference(
        q_THd, k_TGd, v_TGd, start=0, scale=0.3, window=window, sinks_H=sinks_H
    )
    assert (found.permute(2, 0, 1, 3).reshape(40, 4, 8) - expected).abs().max() < 2e-6


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
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_of_long_prompt_allocate_at_most_query_size(window: int | None, start: int) -> None:
    """The meta device allocates like a GPU, with gpt-oss's heads."""
    T, H, G, d = 8192, 64, 8, 64
    meta = torch.device("meta")
    seq = SequenceRows(0, T, start, slice(0, start + T))
    q_THd = torch.empty(T, H, d, device=meta, dtype=torch.bfloat16)
    pool_PGd = torch.empty(start + T, G, d, device=meta, dtype=torch.bfloat16)
    fresh_TGd, sinks_H = pool_PGd[:T], torch.empty(H, device=meta)
    with _Largest() as made:  # type: ignore[no-untyped-call]
        plan = plan_attention([seq], window=window, dtype=torch.bfloat16, device=meta)
        ragged_attention(
            q_THd, fresh_TGd, fresh_TGd, pool_PGd, pool_PGd, plan, scale=0.1, sinks_H=sinks_H
        )
    assert made.elements == q_THd.numel()  # the result


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bfloat16_error_stays_within_rounding(is_compiled: bool) -> None:
    shapes = [(40, 9, False), (1, 9, False), (200, 300, False)]
    assert run_ragged(shapes, window=None, dtype=torch.bfloat16, is_compiled=is_compiled) < 3e-2


LATENT_SHAPE = st.tuples(st.integers(1, 7), st.integers(0, 9))  # new tokens, cached ones


@settings(deadline=None, max_examples=60)
@given(st.lists(LATENT_SHAPE, min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_any_ragged_batch_of_latents_equals_reference(
    shapes: list[tuple[int, int]], H: int, absorb: bool
) -> None:
    generator = torch.Generator().manual_seed(len(shapes) * 31 + shapes[0][0])
    n, p, v, r, scale = 5, 4, 3, 6, 0.4
    total = sum(count + start for count, start in shapes)
    pool = torch.randn(total + 2, 1, r + p, generator=generator)
    weight = torch.randn(H, n + v, r, generator=generator)
    q_THd = torch.randn(sum(count for count, _ in shapes), H, n + p, generator=generator)
    shuffled = torch.randperm(total, generator=generator) + 2
    sequences: list[SequenceRows] = []
    slots: list[torch.Tensor] = []
    first = used = 0
    for count, start in shapes:
        slots.append(shuffled[used : used + start + count])
        sequences.append(SequenceRows(first, count, start, slots[-1]))
        first, used = first + count, used + start + count
    new_T = torch.cat([s[seq.start :] for s, seq in zip(slots, sequences, strict=True)])
    plan = plan_attention(sequences, window=None, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "_absorbs", lambda *_: absorb)
        out_THv = ragged_latent_attention(
            q_THd, pool[new_T], pool, LatentUp(weight, n), plan, scale=scale
        )
    for seq, own in zip(sequences, slots, strict=True):
        rows = slice(seq.first, seq.first + seq.count)
        expected = latent_attention_reference(
            q_THd[rows], pool[own, 0], weight, nope_dim=n, start=seq.start, scale=scale
        )
        torch.testing.assert_close(out_THv[rows].double(), expected, atol=1e-5, rtol=1e-5)
