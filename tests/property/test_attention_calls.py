"""The planner's count of attention calls against the kernel's plan."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import plan_attention
from kernels.attention_ops import SequenceRows
from planner.costs.model_shape import Calls, calls_of, share_of

chunk = st.tuples(st.integers(0, 900), st.integers(1, 400)).map(lambda c: (c[0], c[0] + c[1]))
prompt = st.integers(1, 300).map(lambda tokens: (0, tokens))
decode = st.integers(1, 3000).map(lambda context: (context, context + 1))
batches = st.lists(st.one_of(prompt, decode, chunk), min_size=1, max_size=60)
windows = st.one_of(st.none(), st.integers(16, 1024))
some = settings(deadline=None, max_examples=150)


def planned(chunks: list[tuple[int, int]], window: int | None) -> Calls:
    """Return the parts of a plan for latents, where each chunk of a prompt is one."""
    counts = [stop - start for start, stop in chunks]
    firsts = itertools.accumulate(counts, initial=0)
    sequences = [
        SequenceRows(first, stop - start, start, slice(0, stop))
        for (start, stop), first in zip(chunks, firsts, strict=False)
    ]
    plan = plan_attention(sequences, window=window)
    return Calls(float(len(plan.prefill)), float(0 if plan.rows is None else len(plan.rows.steps)))


@some
@given(batches, windows)
def test_calls_match_kernel_plan(chunks: list[tuple[int, int]], window: int | None) -> None:
    assert calls_of(chunks, window) == planned(chunks, window)


@some
@given(st.one_of(prompt, decode, chunk), st.integers(1, 200), windows)
def test_chunk_share_equals_calls_of_many_equal_chunks(
    one: tuple[int, int], times: int, window: int | None
) -> None:
    share, together = share_of(*one, window).total, calls_of([one] * times, window).total
    assert together - 1 < times * share + 1e-9
    assert times * share <= together + 1e-9


def test_decodes_share_a_call() -> None:
    assert calls_of([(0, 12), (0, 20), (30, 90)], None) == Calls(3.0, 0.0)
    assert calls_of([(511, 512)] * 16, None) == Calls(0.0, 1.0)
    assert calls_of([(511, 512)] * 33, None) == Calls(0.0, 2.0)
    assert share_of(0, 1000, None) == Calls(1.0, 0.0)
    assert share_of(511, 512, None).decodes == pytest.approx(1 / 32)
