"""Stage models from a model's shape, against independent counts."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.moe.dispatch import plan_dispatch
from cluster.fleet.hardware import load_hardware
from contracts.errors import ConfigError
from contracts.hardware import AttentionCost, LinkCost, ServingCost
from models.decoder.kv_pool import kv_bytes_per_token
from models.weights import layout
from planner.costs.cost_model import (
    attention_model,
    batch_attention_ms,
    link_model,
    quadratic_fraction,
    serving_ms,
    stage_models,
)
from planner.costs.model_shape import chunk_work, hit_fraction
from planner.costs.routing_shape import RankShare, Spread, uniform_spread
from planner.placement.slots import ExpertPlacement, contiguous
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, spec_of, split

GEMM_ALPHA, GEMM_BETA, ATTENTION_ALPHA, ATTENTION_BETA = 0.17, 8.59e-11, 0.15, 1.54e-11
TESTBED_A = load_hardware("findep-testbed-a")
QWEN, V2 = shape(QWEN3_235B), shape(DEEPSEEK_V2)


@pytest.mark.parametrize("config", [QWEN3_235B, DEEPSEEK_V2], ids=["grouped", "latent"])
def test_bytes_match_allocations_of_ranks(config: dict[str, object]) -> None:
    spec, counted = spec_of(config), shape(config)
    assert counted.kv_token_bytes == kv_bytes_per_token(spec, torch.bfloat16)
    whole = sum(
        math.prod(wanted.shape) * (4 if wanted.float32 else 2)
        for wanted in layout.attention_half_tensors(spec)
    )
    assert counted.attention_rank_bytes == whole
    assert counted.expert_elements == 3 * spec.hidden_size * spec.expert_ffn_size


def test_expert_time_is_eq_3_with_its_factor_3_and_whole_experts() -> None:
    stages = stage_models(V2, TESTBED_A, split(2, 6))
    experts = 27  # ceil(160 / 6)
    assert stages.expert.alpha_ms == pytest.approx(3 * experts * GEMM_ALPHA)
    assert stages.expert.beta_ms == pytest.approx(3 * experts * GEMM_BETA * 5120 * 1536, rel=1e-4)


def test_shared_expert_time_is_eq_2() -> None:
    shared = stage_models(V2, TESTBED_A, split(4, 4, tokens=1024)).shared
    assert shared is not None
    assert shared.alpha_ms == pytest.approx(3 * 2 * GEMM_ALPHA)
    assert shared.beta_ms == pytest.approx(3 * 2 * GEMM_BETA * 1024 * 5120 * 1536, rel=1e-4)


def test_link_time_is_eq_4_in_elements_for_the_printed_splits() -> None:
    stages = stage_models(V2, TESTBED_A, split(4, 4))
    assert stages.a2e == stages.e2a
    assert stages.a2e.alpha_ms == pytest.approx(0.37)
    assert stages.a2e.beta_ms == pytest.approx(2.55e-6 * 160 * 5120 / 4, rel=1e-4)


def test_attention_time_is_eq_1_for_multi_head_attention() -> None:
    """Up to the diagonal of the mask and the router, which the paper leaves out."""
    heads, d, tokens, model_dim = 32, 128, 4096, 4096
    mha = shape(
        QWEN3_235B, num_attention_heads=heads, num_key_value_heads=heads, num_experts=8,
        hidden_size=model_dim,
    )  # fmt: skip
    found = attention_model(TESTBED_A.attention, mha, split(4, 4, tokens))
    linear = 4 * GEMM_BETA * tokens * model_dim * heads * d
    square = ATTENTION_BETA * tokens**2 * heads * 2 * d
    assert found.alpha_ms == pytest.approx(4 * GEMM_ALPHA + ATTENTION_ALPHA)
    assert found.beta_ms == pytest.approx(linear + square, rel=2e-3)
    part = quadratic_fraction(TESTBED_A.attention, mha, split(4, 4, tokens))
    assert part == pytest.approx(square / (linear + square), rel=2e-3)


@given(st.integers(0, 60), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 40)))
def test_pairs_match_the_mask(start: int, new: int, window: int | None) -> None:
    stop = start + new
    reach = window or stop
    pairs = sum(
        1 for q, k in itertools.product(range(start, stop), range(stop)) if q - reach < k <= q
    )
    work = chunk_work(QWEN, start, stop, window)
    assert work.attended_flops == pytest.approx(4 * 64 * 128 * pairs)
    assert work.linear_flops == 2 * new * (QWEN.projection_elements + 4096 * 128)


def test_decode_reads_its_context_and_prompts_do_not() -> None:
    assert chunk_work(QWEN, 0, 512, None).context_bytes == 0
    assert chunk_work(QWEN, 4095, 4096, None).context_bytes == 4096 * 2 * 4 * 128 * 2
    assert chunk_work(QWEN, 4095, 4096, 128).context_bytes == 129 * 2 * 4 * 128 * 2


def test_latent_attention_absorbs_decode_steps_and_expands_prompts() -> None:
    latent = V2.latent
    assert latent is not None
    pair = chunk_work(V2, 9999, 10000, None).attended_flops / 10000 / 128 / 2
    assert pair == 2 * latent.kv_rank + latent.rope_dim
    pairs = 4096 * 4097 / 2
    assert chunk_work(V2, 0, 4096, None).attended_flops / pairs / 128 / 2 == 128 + 64 + 128


def test_ragged_batch_costs_one_call_and_its_chunks() -> None:
    cost = AttentionCost(
        call_ms=1.0, sequence_ms=0.1, linear_ms_per_flop=1e-9, attended_ms_per_flop=2e-9
    )
    single = [batch_attention_ms(cost, QWEN, [chunk]) for chunk in ((0, 7), (100, 164))]
    assert batch_attention_ms(cost, QWEN, [(0, 7), (100, 164)]) == pytest.approx(sum(single) - 1.0)
    model = attention_model(cost, QWEN, split(1, 1, 64, 100))
    assert model.at(1) == pytest.approx(single[1])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_hit_fraction_matches_enumeration(experts: int, chosen: int, held: int) -> None:
    chosen, held = min(chosen, experts), min(held, experts)
    small = shape(QWEN3_235B, num_experts=experts, num_experts_per_tok=chosen)
    choices = list(itertools.combinations(range(experts), chosen))
    hits = sum(1 for choice in choices if min(choice) < held) / len(choices)
    assert hit_fraction(small, held) == pytest.approx(hits)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([8, 24]), st.integers(0, 2**32))
def test_link_bytes_are_those_of_the_packets_that_dispatch_cuts(
    ag: int, eg: int, experts: int, seed: int
) -> None:
    """Uniform routing of 2000 tokens of one attention rank, one token group."""
    small = shape(QWEN3_235B, num_experts=experts, num_experts_per_tok=4, hidden_size=64)
    tokens = 2000
    ids = np.argsort(np.random.default_rng(seed).random((tokens, experts)), axis=1)[:, :4]
    placement = ExpertPlacement(contiguous(experts, eg, num_layers=1, moe_layers=[0])).layer(0)
    weights = np.ones(ids.shape, np.float32)
    slices = plan_dispatch(ids.astype(np.int64), weights, [(0, tokens)], placement)
    fullest = [piece for piece in slices if piece.rank == 0]
    num_bytes = sum(piece.num_rows * 64 * 2 + 8 * len(piece.index_N) for piece in fullest)
    me = tokens * ag * 4 / experts
    link = LinkCost(backend="shm", direction="both", alpha_ms=0.0, ms_per_byte=1.0)
    busiest = (
        max(ag, eg) * num_bytes
    )  # bytes that one attention rank sends, or one expert rank gets
    assert link_model(link, small, split(ag, eg), "a2e").at(me) == pytest.approx(busiest, rel=0.05)
    assert uniform_spread(small, eg).copies <= min(eg, 4) + 1e-9


def test_split_without_figures_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"attention_ranks=3.*1\+7, 2\+6, 4\+4"):
        stage_models(V2, TESTBED_A, split(3, 5))


def test_unknown_backend_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"backend=tcp.*nccl"):
        stage_models(V2, TESTBED_A, split(4, 4), "tcp")


def test_further_packets_and_copies_cost_the_attention_rank() -> None:
    cost = AttentionCost(
        call_ms=1.0,
        linear_ms_per_flop=1e-9,
        attended_ms_per_flop=1e-9,
        packet_ms=0.25,
        copied_ms_per_byte=1e-6,
    )
    share = RankShare(rows=0.5, pairs=QWEN.num_experts / 4)
    spread = Spread(ranks=4, slots=32, mean=share, busiest=share)  # two copies of each token
    chunks = [(0, 10), (5, 20)]
    one, four = (
        batch_attention_ms(cost, QWEN, chunks),
        batch_attention_ms(cost, QWEN, chunks, spread),
    )
    row_bytes = QWEN.hidden_size * QWEN.element_bytes
    assert four - one == pytest.approx(3 * 0.25 + (2 - 1) * 25 * row_bytes * 1e-6)
    model = attention_model(cost, QWEN, split(1, 4, 10), spread)
    assert model.at(3) == pytest.approx(batch_attention_ms(cost, QWEN, [(0, 10)] * 3, spread))
    assert batch_attention_ms(cost, QWEN, chunks, uniform_spread(QWEN, 1)) == one


def test_grouped_calls_of_a_micro_batch_are_counted() -> None:
    plain = AttentionCost(call_ms=1.0, linear_ms_per_flop=1e-9, attended_ms_per_flop=1e-9)
    cost = msgspec.structs.replace(plain, prompt_call_ms=0.2, decode_call_ms=0.1)

    def calls_ms(chunks: list[tuple[int, int]]) -> float:
        return batch_attention_ms(cost, QWEN, chunks) - batch_attention_ms(plain, QWEN, chunks)

    assert calls_ms([(0, 64)] * 32) == pytest.approx(0.2)  # one group
    assert calls_ms([(0, 12), (0, 30), (0, 90), (0, 200)]) == pytest.approx(5 * 0.2)
    assert calls_ms([(511, 512)] * 16) == pytest.approx(2 * 0.1)
    for samples in (1, 65, 129):  # of which 64 are a group
        model = attention_model(cost, QWEN, split(1, 1, 64))
        together = batch_attention_ms(cost, QWEN, [(0, 64)] * samples)
        assert model.at(samples) == pytest.approx(together)


def test_serving_time_includes_measured_costs_and_logits() -> None:
    h200 = load_hardware("h200-node")
    sizes = {"micro_batches": 2, "sequences": 3.0, "tokens": 100.0}
    assert serving_ms(h200, QWEN, **sizes) == 0.0  # type: ignore[arg-type]
    cost = ServingCost(batch_ms=1.0, micro_batch_ms=0.5, sequence_ms=0.1, token_ms=0.01)
    found = serving_ms(msgspec.structs.replace(h200, serving=cost), QWEN, **sizes)  # type: ignore[arg-type]
    logits = 3 * 2 * QWEN.hidden_size * QWEN.vocab_size * h200.attention.linear_ms_per_flop
    assert found == pytest.approx(1.0 + 2 * 0.5 + 3 * 0.1 + 100 * 0.01 + logits)
