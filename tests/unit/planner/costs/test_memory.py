"""Number of samples that fit, and the advice of its errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ResourceError
from planner.costs.memory import max_samples, rank_memories, sample_kv_bytes
from planner.costs.model_shape import ModelShape
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, small_shapes, split

GIB = 1 << 30
some = settings(deadline=None, max_examples=60)


def test_sample_kv_covers_new_and_cached_tokens_of_all_layers() -> None:
    grouped = sample_kv_bytes(shape(QWEN3_235B), split(tokens=100, context=900))
    assert grouped == 1000 * 94 * 2 * 4 * 128 * 2
    latent = sample_kv_bytes(shape(DEEPSEEK_V2), split(tokens=1, context=999))
    assert latent == 1000 * 60 * (512 + 64) * 2


def test_weights_of_both_groups_sum_to_the_model() -> None:
    """235 billion parameters, of which each of 8 expert ranks holds an eighth of the experts."""
    attention, expert = rank_memories(shape(QWEN3_235B), split(1, 8), 141e9)
    assert (attention.weight_bytes + 8 * expert.weight_bytes) / 2 == pytest.approx(235e9, rel=0.01)


@some
@given(small_shapes, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4096))
def test_max_samples_fit_and_one_more_does_not(
    model: ModelShape, ag: int, eg: int, tokens: int
) -> None:
    deployment, usable = split(ag, min(eg, model.num_experts), tokens), 64.0 * GIB
    try:
        samples = max_samples(model, deployment, usable)
    except ResourceError:
        return
    needed = [
        memory.weight_bytes + (samples + extra) * memory.sample_bytes
        for memory in rank_memories(model, deployment, usable)
        for extra in (0, 1)
    ]
    assert max(needed[0], needed[2]) <= usable < max(needed[1], needed[3])


@some
@given(small_shapes, st.integers(1, 1 << 22), st.floats(0.05, 20.0))
def test_advised_length_is_the_longest_that_fits(
    model: ModelShape, tokens: int, gib: float
) -> None:
    try:
        max_samples(model, split(1, 1, tokens), gib * GIB)
    except ResourceError as error:
        advised = re.search(r"at most sequence_tokens=(\d+) fits", error.message)
        if advised is None:
            return
        most = int(advised[1])
        assert max_samples(model, split(1, 1, most), gib * GIB) >= 1
        with pytest.raises(ResourceError):
            max_samples(model, split(1, 1, most + 1), gib * GIB)


def test_too_few_expert_ranks_are_rejected_with_a_number_that_fits() -> None:
    model = shape(QWEN3_235B)
    with pytest.raises(ResourceError, match=r"expert_ranks.* or more would fit") as caught:
        max_samples(model, split(1, 2), 100.0 * GIB)
    advised = re.search(r"(\d+) or more would fit", caught.value.message)
    assert advised is not None
    assert max_samples(model, split(1, int(advised[1])), 100.0 * GIB) >= 1


@pytest.mark.parametrize(
    ("usable_gib", "message"),
    [(1.0, "attention rank's weights are"), (0.001, "give devices with more")],
)
def test_too_small_devices_are_rejected(usable_gib: float, message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        max_samples(shape(QWEN3_235B), split(), usable_gib * GIB)
