"""Attention over latents against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import latent_attention
from kernels.attention import plan_attention
from kernels.latent_attention import LatentUp
from kernels.rows import SequenceRows
from tests.support.kernel_reference import latent_attention_reference, ragged_latent_attention


@pytest.mark.parametrize(
    ("count", "context", "absorbs"),
    [(300, 300, False), (1, 300, True), (30, 4000, True), (600, 4000, False), (2, 2, False)],
)
def test_short_chunks_behind_prefix_absorb(count: int, context: int, absorbs: bool) -> None:
    up = LatentUp(torch.empty(1, 256, 512), 128)
    assert latent_attention._absorbs(count, context, up) == absorbs


SHAPE = st.tuples(st.integers(1, 7), st.integers(0, 9))  # new tokens, cached ones


@settings(deadline=None, max_examples=60)
@given(st.lists(SHAPE, min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_any_ragged_batch_equals_reference(
    shapes: list[tuple[int, int]], H: int, absorb: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "_absorbs", lambda *_: absorb)
        _compare(shapes, H)


def _compare(shapes: list[tuple[int, int]], H: int) -> None:
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
    out_THv = ragged_latent_attention(
        q_THd, pool[new_T], pool, LatentUp(weight, n), plan, scale=scale
    )
    for seq, own in zip(sequences, slots, strict=True):
        rows = slice(seq.first, seq.first + seq.count)
        expected = latent_attention_reference(
            q_THd[rows], pool[own, 0], weight, nope_dim=n, start=seq.start, scale=scale
        )
        torch.testing.assert_close(out_THv[rows].double(), expected, atol=1e-5, rtol=1e-5)
