"""Token times with experts read on demand or ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.planning.planner_inputs import shape_of
from cluster.fleet.hardware import load_hardware
from planner.costs.model_shape import ModelShape
from planner.costs.offloading import Tier, active_experts, most_sequences, offloaded_token
from tests.support.model_shapes import QWEN3_235B, spec_of

SHAPE: ModelShape = shape_of(spec_of(QWEN3_235B), torch.bfloat16)
HARDWARE = load_hardware("h200-node")


def test_active_experts_for_uniform_routing() -> None:
    assert active_experts(SHAPE, 1) == pytest.approx(SHAPE.top_k)
    assert active_experts(SHAPE, 1000) == pytest.approx(SHAPE.num_experts)
    share = SHAPE.top_k / SHAPE.num_experts
    assert active_experts(SHAPE, 2) == pytest.approx(SHAPE.num_experts * (1 - (1 - share) ** 2))


@given(
    kept=st.floats(0.0, 0.99),
    rate=st.floats(1e8, 1e12),
    sequences=st.integers(1, 64),
    hits=st.none() | st.floats(0, 1),
)
def test_read_ahead_time_is_between_resident_and_on_demand(
    kept: float, rate: float, sequences: int, hits: float | None
) -> None:
    found = offloaded_token(HARDWARE, SHAPE, Tier(kept, rate, hits), sequences, 1024)
    assert found.resident_ms <= found.ahead_ms * (1 + 1e-9)
    assert found.ahead_ms <= found.on_demand_ms * (1 + 1e-9)
    assert found.on_demand_ms <= 2 * found.ahead_ms  # Eq. 1: at most half is gained


def test_read_ahead_gain_with_equal_read_and_compute_times() -> None:
    """Speculating Experts, Eq. 1."""
    compute_ms = offloaded_token(HARDWARE, SHAPE, Tier(0.0, 1e30), 1, 1024).resident_ms
    bytes_read = SHAPE.moe_layers * SHAPE.top_k * SHAPE.expert_elements * SHAPE.element_bytes
    found = offloaded_token(HARDWARE, SHAPE, Tier(0.0, 1e3 * bytes_read / compute_ms), 1, 1024)
    layers = SHAPE.moe_layers
    assert found.on_demand_ms == pytest.approx(2 * compute_ms)
    assert found.ahead_ms == pytest.approx(compute_ms * (layers + 1) / layers)


def test_twice_the_rate_halves_read_time() -> None:
    slow = offloaded_token(HARDWARE, SHAPE, Tier(0.5, 1e9), 1, 64)
    fast = offloaded_token(HARDWARE, SHAPE, Tier(0.5, 2e9), 1, 64)
    adds = slow.on_demand_ms - slow.resident_ms
    assert fast.on_demand_ms - fast.resident_ms == pytest.approx(adds / 2)
    assert slow.missing == pytest.approx(SHAPE.top_k / 2)


def test_stored_format_holds_more_experts_and_reads_faster() -> None:
    computed = offloaded_token(HARDWARE, SHAPE, Tier(0.25, 1e9), 1, 64)
    tier = Tier(0.25, 1e9, stored_fraction=0.5)
    stored = offloaded_token(HARDWARE, SHAPE, tier, 1, 64)
    assert tier.held == 0.5
    assert stored.missing == pytest.approx(SHAPE.top_k / 2)
    adds = computed.on_demand_ms - computed.resident_ms
    assert stored.on_demand_ms - stored.resident_ms == pytest.approx(adds / 2 * (0.5 / 0.75))
    assert offloaded_token(HARDWARE, SHAPE, Tier(0.5, 1e9, None, 0.5), 64, 64).missing == 0.0


@pytest.mark.parametrize("kept", [0.05, 0.25, 0.5, 0.9])
def test_most_sequences_is_the_largest_that_fits(kept: float) -> None:
    most = most_sequences(SHAPE, kept)
    if most:
        assert active_experts(SHAPE, most) <= kept * SHAPE.num_experts * (1 + 1e-9)
    assert active_experts(SHAPE, most + 1) > kept * SHAPE.num_experts


def test_step_larger_than_the_cache_hits_no_expert() -> None:
    tier = Tier(0.5, 1e9)
    most = most_sequences(SHAPE, 0.5)
    below = offloaded_token(HARDWARE, SHAPE, tier, most, 64)
    above = offloaded_token(HARDWARE, SHAPE, tier, most + 1, 64)
    assert below.missing == pytest.approx(0.5 * active_experts(SHAPE, most))
    assert above.missing == pytest.approx(active_experts(SHAPE, most + 1))
