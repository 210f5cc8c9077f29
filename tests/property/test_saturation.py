"""Eq. 1 to 3 of MoE-Prefill against each other and against plain counting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.routing_messages import Calibration
from planner.costs.model_shape import ModelShape, layer_mean_work
from planner.routing.request_work import flops_work, token_work, work_of
from planner.routing.saturation import (
    SaturationConfig,
    calibrated_threshold,
    threshold,
    transfer_threshold_flops,
)
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, small_shapes
from tests.support.routing import calibrations

some = settings(deadline=None, max_examples=60)
rates = st.floats(1e9, 1e15)
windows = st.sampled_from([None, 1, 5, 64])


@some
@given(small_shapes, st.floats(1e-5, 1.0), rates, st.lists(st.integers(1, 500), min_size=1))
def test_eq_3_is_eq_1_where_the_reference_batch_waits_for_transfers(
    model: ModelShape, transfer_s: float, flops_per_s: float, prompts: list[int]
) -> None:
    work, layers = flops_work(model), model.num_layers
    compute_s = sum(work(0, tokens) for tokens in prompts) / layers / flops_per_s
    calibration = Calibration(
        first_layer_s=compute_s,
        slowest_layer_s=max(compute_s, transfer_s),
        reference_prompts=tuple(prompts),
    )
    needed = transfer_threshold_flops(
        transfer_s=max(compute_s, transfer_s), layers=layers, flops_per_s=flops_per_s
    )
    assert calibrated_threshold(calibration, work) == pytest.approx(needed, rel=1e-9, abs=1)


@some
@given(calibrations, st.integers(1, 1 << 60))
def test_pinned_threshold_ignores_calibration(calibration: Calibration, pinned: int) -> None:
    config = SaturationConfig(fallback_prompts=(1,), pinned=pinned)
    assert threshold(config, token_work, calibration) == pinned


@some
@given(calibrations)
def test_fallback_threshold_is_eq_3_without_stretch(calibration: Calibration) -> None:
    config = SaturationConfig(fallback_prompts=calibration.reference_prompts)
    fallback = threshold(config, token_work, None)
    assert fallback <= threshold(config, token_work, calibration)
    assert fallback == pytest.approx(1.1 * sum(calibration.reference_prompts), abs=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pinned": 0}, "saturation.pinned=0: no request would ever be routed"),
        ({"margin_fraction": -0.5}, "saturation.margin_fraction=-0.5: give 0 to 10"),
        ({"fallback_prompts": ()}, "saturation.fallback_prompts="),
    ],
)
def test_invalid_value_is_rejected_with_field_and_number(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SaturationConfig(**{"fallback_prompts": (1,), **fields})


@pytest.mark.parametrize(("first", "slowest"), [(0.0, 1.0), (2.0, 1.0), (1.0, float("nan"))])
def test_impossible_calibration_is_rejected(first: float, slowest: float) -> None:
    with pytest.raises(ValueError, match="layer"):
        Calibration(first_layer_s=first, slowest_layer_s=slowest, reference_prompts=(1,))


@some
@given(small_shapes, windows, st.integers(0, 90), st.integers(1, 90))
def test_work_is_what_counting_every_token_and_pair_gives(
    model: ModelShape, window: int | None, cached: int, fresh: int
) -> None:
    model = _with_window(model, window)
    per_token = model.projection_elements + model.hidden_size * model.num_experts
    per_token += model.top_k * model.expert_elements + model.shared_elements
    seen = [min(token + 1, window or token + 1) for token in range(cached, cached + fresh)]
    pair_flops = 4 * model.num_heads * model.head_dim
    expected = model.num_layers * (2 * fresh * per_token + pair_flops * sum(seen))
    assert flops_work(model)(cached, cached + fresh) == expected


@some
@given(st.sampled_from([QWEN3_235B, DEEPSEEK_V2]), st.integers(0, 3000), st.integers(1, 3000))
def test_work_agrees_with_the_planner_s_attention(
    config: dict[str, object], cached: int, fresh: int
) -> None:
    model = shape(config)
    attention = layer_mean_work(model, cached, cached + fresh)
    dense_layers = model.num_layers - model.moe_layers
    rest = model.moe_layers * (model.top_k * model.expert_elements + model.shared_elements)
    rest += model.dense_elements - dense_layers * model.hidden_size * model.num_experts
    expected = model.num_layers * (attention.linear_flops + attention.attended_flops)
    expected += 2.0 * fresh * rest
    assert flops_work(model)(cached, cached + fresh) == pytest.approx(expected, rel=1e-9)


@some
@given(small_shapes, st.integers(0, 900), st.integers(0, 900), st.integers(0, 900))
def test_work_done_in_pieces_adds_up_exactly(model: ModelShape, a: int, b: int, c: int) -> None:
    start, middle, stop = sorted((a, b, c))
    work = flops_work(model)
    assert work(start, middle) + work(middle, stop) == work(start, stop)


def test_dense_layers_of_deepseek_are_counted() -> None:
    model = shape(DEEPSEEK_V2)
    assert model.dense_elements == 3 * 5120 * 12288


def test_work_without_shape_is_in_tokens() -> None:
    assert work_of(None)(16, 40) == 24
    assert work_of(shape(QWEN3_235B))(16, 40) > 24e9


def _with_window(model: ModelShape, window: int | None) -> ModelShape:
    return msgspec.structs.replace(model, windows=(window,) * model.num_layers)
