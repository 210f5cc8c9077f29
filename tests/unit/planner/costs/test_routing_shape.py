"""Effects of copies and load on links, experts and memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fleet.hardware import load_hardware
from contracts.hardware import LinkCost
from planner.costs.cost_model import expert_model, link_model, stage_models
from planner.costs.memory import rank_memories
from planner.costs.model_shape import ModelShape, hit_fraction
from planner.costs.routing_shape import RankShare, RoutingShape, Spread, uniform_spread
from tests.support.model_shapes import QWEN3_235B, shape, small_shapes, split

H200, QWEN = load_hardware("h200-node"), shape(QWEN3_235B)
LINK = LinkCost(backend="nccl", direction="both", alpha_ms=0.01, ms_per_byte=3e-8)
ROW_BYTES = QWEN.hidden_size * QWEN.element_bytes
ranks = st.integers(1, 9)


def spread(copies: float, load: float, rows: float | None = None, *, eg: int = 4) -> Spread:
    """128 experts on eg ranks; rows: of the busiest rank."""
    mean = RankShare(copies / eg, 128 / eg)
    busiest = RankShare(copies / eg if rows is None else rows, load * 128 / eg)
    return Spread(eg, 128 // eg, mean, busiest)


@given(small_shapes, ranks, ranks)
def test_uniform_routing_matches_the_formulas_exactly(small: ModelShape, ag: int, eg: int) -> None:
    deployment = split(ag, eg)
    experts = small.experts_per_rank(eg)
    tokens = small.num_experts / (ag * small.top_k)
    row_bytes = small.hidden_size * small.element_bytes
    packet_bytes = tokens * hit_fraction(small, experts) * row_bytes
    e2a = max(ag, eg) * packet_bytes * LINK.ms_per_byte
    packet_bytes += tokens * small.top_k * experts / small.num_experts * 8
    a2e = max(ag, eg) * packet_bytes * LINK.ms_per_byte
    found = [link_model(LINK, small, deployment, way).beta_ms for way in ("a2e", "e2a")]
    assert found == [a2e, e2a]
    expert = expert_model(H200, small, uniform_spread(small, eg))
    assert expert.beta_ms == experts * small.pair_flops * H200.expert.ms_per_flop


def test_fewer_copies_shorten_the_link_with_many_expert_ranks() -> None:
    deployment = split(2, 4)
    times = [
        link_model(LINK, QWEN, deployment, "e2a", spread(copies, 1.3)).beta_ms
        for copies in (3.0, 1.5)
    ]
    assert times[0] == pytest.approx(128 / (2 * 8) * 3.0 * ROW_BYTES * LINK.ms_per_byte)
    assert times[1] == pytest.approx(times[0] / 2)


def test_busiest_rows_count_with_many_attention_ranks() -> None:
    deployment = split(6, 2)
    uneven = spread(1.5, 1.2, rows=0.9, eg=2)
    busy_ms = link_model(LINK, QWEN, deployment, "e2a", uneven).beta_ms
    assert busy_ms == pytest.approx(128 / 8 * 0.9 * ROW_BYTES * LINK.ms_per_byte)


def test_load_scales_expert_compute_and_slots_scale_launch() -> None:
    even, late = spread(3.0, 1.0), spread(3.0, 1.5)._replace(slots=40)
    one, other = expert_model(H200, QWEN, even), expert_model(H200, QWEN, late)
    assert other.beta_ms == pytest.approx(1.5 * one.beta_ms)
    assert other.alpha_ms - one.alpha_ms == pytest.approx(
        8 * (expert_model(H200, QWEN, even._replace(slots=1)).alpha_ms - H200.expert.call_ms)
    )


def test_link_without_deduplication_ignores_copies() -> None:
    """Coefficients printed for FinDEP's Eq. 4."""
    link = LinkCost(
        backend="x", direction="both", alpha_ms=0.0, ms_per_byte=1e-8, deduplicated=False
    )
    found = [
        link_model(link, QWEN, split(2, 4), "a2e", spread(copies, 1.0)).beta_ms
        for copies in (3.0, 1.5)
    ]
    assert found[0] == found[1]


def test_spare_slots_and_copies_are_in_the_memory_of_a_rank() -> None:
    usable_bytes = 1e12
    lean = rank_memories(QWEN, split(2, 4), usable_bytes, spread(1.5, 1.0))
    full = rank_memories(QWEN, split(2, 4), usable_bytes, spread(3.0, 1.0)._replace(slots=40))
    slot_bytes = QWEN.moe_layers * QWEN.expert_elements * QWEN.element_bytes
    assert full[1].weight_bytes - lean[1].weight_bytes == 8 * slot_bytes
    assert full[0].sample_bytes - lean[0].sample_bytes == 2048 * 2 * 1.5 * ROW_BYTES
    assert full[1].sample_bytes == 2 * lean[1].sample_bytes


def test_mean_of_layers() -> None:
    routing = RoutingShape((spread(3.0, 1.0), spread(2.0, 1.4)))
    assert not routing.is_even
    assert (routing.mean.copies, routing.mean.load) == pytest.approx((2.5, 1.2))
    even = RoutingShape((spread(3.1, 1.1),) * 3)
    assert even.is_even
    assert even.mean == even.layers[0]


@given(
    st.lists(st.tuples(st.floats(1, 4), st.floats(1, 4)), min_size=1, max_size=6),
    st.floats(0, 1e4),
)
def test_stages_of_the_mean_equal_mean_stages(layers: list[tuple[float, float]], me: float) -> None:
    """Every stage's time is linear in copies and load; a link's bound is convex."""
    routing = RoutingShape(tuple(spread(*each) for each in layers))
    each = [stage_models(QWEN, H200, split(4, 4), spread=one) for one in routing.layers]
    mean = stage_models(QWEN, H200, split(4, 4), spread=routing.mean)
    by_layer = sum(stages.expert.at(me) for stages in each) / len(each)
    assert mean.expert.at(me) == pytest.approx(by_layer)
    link = sum(stages.e2a.at(me) for stages in each) / len(each)
    assert mean.e2a.at(me) <= link * (1 + 1e-9)
