"""Stage models from shapes of models and of routing, against independent counts."""

import itertools
import json
import math
from typing import Any

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
from models.decoder.attention import kv_bytes_per_token
from models.weights import layout
from planner.costs.cost_model import (
    Direction,
    attention_model,
    attention_ms,
    chunk_costs,
    expert_model,
    link_model,
    serving_ms,
    stage_models,
)
from planner.costs.memory import rank_memories
from planner.costs.model_shape import Chunks, ModelShape, chunk_work, hit_fraction, layer_mean_batch
from planner.costs.routing_shape import RankShare, RoutingShape, Spread, uniform_spread
from planner.costs.stages import Linear, PlanSpec, StageModels
from planner.placement.slots import ExpertPlacement, contiguous
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, small_shapes, spec_of, split

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


def test_stage_times_are_eq_2_to_4_with_factor_3_and_whole_experts() -> None:
    """Eq. 4 in elements, for the printed splits."""
    stages = stage_models(V2, TESTBED_A, split(2, 6))
    experts = 27  # ceil(160 / 6)
    assert stages.expert.alpha_ms == pytest.approx(3 * experts * GEMM_ALPHA)
    assert stages.expert.beta_ms == pytest.approx(3 * experts * GEMM_BETA * 5120 * 1536, rel=1e-4)
    stages = stage_models(V2, TESTBED_A, split(4, 4, tokens=1024))
    assert stages.shared is not None
    assert stages.shared.alpha_ms == pytest.approx(3 * 2 * GEMM_ALPHA)
    assert stages.shared.beta_ms == pytest.approx(3 * 2 * GEMM_BETA * 1024 * 5120 * 1536, rel=1e-4)
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
    costs = chunk_costs(TESTBED_A.attention, mha, split(4, 4, tokens))
    part = costs["attention_quadratic_fraction"]
    assert part == pytest.approx(square / (linear + square), rel=2e-3)


@given(st.integers(0, 60), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 40)))
def test_pairs_match_the_mask(start: int, new: int, window: int | None) -> None:
    stop = start + new
    reach = window or stop
    pairs = sum(q - reach < k <= q for q in range(start, stop) for k in range(stop))
    work = chunk_work(QWEN, start, stop, window)
    assert work.attended_flops == pytest.approx(4 * 64 * 128 * pairs)
    assert work.linear_flops == 2 * new * (QWEN.projection_elements + 4096 * 128)


def test_decode_reads_its_context_and_prompts_do_not() -> None:
    assert chunk_work(QWEN, 0, 512, None).context_bytes == 0
    assert chunk_work(QWEN, 4095, 4096, None).context_bytes == 4096 * 2 * 4 * 128 * 2
    assert chunk_work(QWEN, 4095, 4096, 128).context_bytes == 129 * 2 * 4 * 128 * 2
    pair = chunk_work(V2, 9999, 10000, None).attended_flops / 10000 / 128 / 2
    assert pair == 2 * 512 + 64, "latent attention absorbs decode steps"
    pairs = 4096 * 4097 / 2
    assert chunk_work(V2, 0, 4096, None).attended_flops / pairs / 128 / 2 == 128 + 64 + 128


def attention(cost: AttentionCost, chunks: Chunks) -> float:
    return attention_ms(cost, QWEN, layer_mean_batch(QWEN, chunks))


def test_ragged_batch_costs_one_call_and_its_chunks() -> None:
    cost = AttentionCost(
        call_ms=1.0, sequence_ms=0.1, linear_ms_per_flop=1e-9, attended_ms_per_flop=2e-9
    )
    single = [attention(cost, [chunk]) for chunk in ((0, 7), (100, 164))]
    assert attention(cost, [(0, 7), (100, 164)]) == pytest.approx(sum(single) - 1.0)
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
def test_link_bytes_are_those_of_dispatched_packets(
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
    busiest = max(ag, eg) * num_bytes  # one attention rank sends, or one expert rank gets
    assert link_model(link, small, split(ag, eg), "a2e").at(me) == pytest.approx(busiest, rel=0.05)
    assert uniform_spread(small, eg).copies <= min(eg, 4) + 1e-9


def test_split_without_figures_and_unknown_backend_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"attention_ranks=3.*1\+7, 2\+6, 4\+4"):
        stage_models(V2, TESTBED_A, split(3, 5))
    with pytest.raises(ConfigError, match=r"backend=tcp.*nccl"):
        stage_models(V2, TESTBED_A, split(4, 4), "tcp")


def test_further_packets_and_copies_cost_the_attention_rank() -> None:
    cost = AttentionCost(
        call_ms=1.0, linear_ms_per_flop=1e-9, attended_ms_per_flop=1e-9, packet_ms=0.25,
        copied_ms_per_byte=1e-6,
    )  # fmt: skip
    share = RankShare(rows=0.5, pairs=QWEN.num_experts / 4)
    spread = Spread(ranks=4, slots=32, mean=share, busiest=share)  # two copies of each token
    one, four, single = (
        attention_model(cost, QWEN, split(1, 4, 10), each)
        for each in (None, spread, uniform_spread(QWEN, 1))
    )
    row_bytes = QWEN.hidden_size * QWEN.element_bytes
    assert one.at(3) == pytest.approx(attention(cost, [(0, 10)] * 3))
    assert four.at(3) - one.at(3) == pytest.approx(3 * 0.25 + (2 - 1) * 30 * row_bytes * 1e-6)
    assert single == one


def test_calls_of_a_micro_batch_are_counted() -> None:
    plain = AttentionCost(call_ms=1.0, linear_ms_per_flop=1e-9, attended_ms_per_flop=1e-9)
    cost = msgspec.structs.replace(plain, prompt_call_ms=0.2, decode_call_ms=0.1)

    def calls_ms(chunks: list[tuple[int, int]]) -> float:
        return attention(cost, chunks) - attention(plain, chunks)

    assert calls_ms([(0, 12), (0, 30), (0, 90), (7, 200)]) == pytest.approx(4 * 0.2)
    assert calls_ms([(511, 512)] * 33) == pytest.approx(2 * 0.1)
    for samples in (1, 65, 129):
        model = attention_model(cost, QWEN, split(1, 1, 64))
        together = attention(cost, [(0, 64)] * samples)
        assert model.at(samples) == pytest.approx(together)


def test_serving_time_includes_measured_costs_and_logits() -> None:
    h200 = load_hardware("h200-node")
    sizes = {"micro_batches": 2, "sequences": 3.0, "tokens": 100.0}
    assert serving_ms(h200, QWEN, **sizes) == 0.0  # type: ignore[arg-type]
    cost = ServingCost(batch_ms=1.0, micro_batch_ms=0.5, sequence_ms=0.1, token_ms=0.01)
    found = serving_ms(msgspec.structs.replace(h200, serving=cost), QWEN, **sizes)  # type: ignore[arg-type]
    logits = 3 * 2 * QWEN.hidden_size * QWEN.vocab_size * h200.attention.linear_ms_per_flop
    assert found == pytest.approx(1.0 + 2 * 0.5 + 3 * 0.1 + 100 * 0.01 + logits)


LINEAR = {"alpha_ms": 0.1, "beta_ms": 0.2}


def document(**changes: Any) -> dict[str, Any]:
    stages = dict.fromkeys(("attention", "shared", "expert", "a2e", "e2a"), LINEAR)
    sizes = {"num_layers": 4, "max_samples": 8, "max_r2": 16, "has_shared": True}
    return {"stages": stages, "tokens_per_expert_per_sample": 32.0, **sizes, **changes}


def decode(value: dict[str, Any]) -> PlanSpec:
    return msgspec.json.decode(json.dumps(value), type=PlanSpec)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e10])
@pytest.mark.parametrize("field", ["alpha_ms", "beta_ms"])
def test_invalid_time_and_free_compute_stage_are_rejected_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        Linear(**(LINEAR | {field: value}))
    stages = {key: Linear(0.1, 0.1) for key in ("attention", "expert", "a2e", "e2a")}
    for name in ("attention", "expert"):
        with pytest.raises(ValueError, match=f"{name}: alpha_ms=0 and beta_ms=0"):
            StageModels(**(stages | {name: Linear(0.0, 0.0)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: give a whole number from 1"),
        ({"max_samples": -3}, "max_samples=-3"),
        ({"max_samples": 10**9}, "max_samples=1000000000"),
        ({"max_r2": 0}, "max_r2=0"),
        ({"tokens_per_expert_per_sample": 0.0}, "tokens_per_expert_per_sample=0"),
        ({"tokens_per_expert_per_sample": -1.0}, "tokens_per_expert_per_sample=-1"),
        ({"tokens_per_expert_per_sample": 0.01}, "raise max_samples to 100"),
        ({"attention_quadratic_fraction": 1.5}, "attention_quadratic_fraction=1.5"),
        ({"attention_chunk_ms": -1.0}, "attention_chunk_ms=-1"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"max_samples": None}, "max_samples"),
        ({"max_sampels": 3}, "max_sampels"),
        (
            {"stages": dict.fromkeys(("attention", "expert", "a2e", "e2a"), LINEAR)},
            r"stages\.shared is missing",
        ),
    ],
)
def test_invalid_spec_is_rejected_by_field_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        decode(document(**changes))


H200 = load_hardware("h200-node")
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


def test_link_time_follows_copies_or_the_busiest_rows() -> None:
    """Many expert ranks; many attention ranks; coefficients printed for FinDEP's Eq. 4."""

    def link_ms(link: LinkCost, ag: int, uneven: Spread, way: Direction = "e2a") -> float:
        return link_model(link, QWEN, split(ag, uneven.ranks), way, uneven).beta_ms

    three, fewer = (link_ms(LINK, 2, spread(copies, 1.3)) for copies in (3.0, 1.5))
    assert three == pytest.approx(128 / (2 * 8) * 3.0 * ROW_BYTES * LINK.ms_per_byte)
    assert fewer == pytest.approx(three / 2)
    busy_ms = link_ms(LINK, 6, spread(1.5, 1.2, rows=0.9, eg=2))
    assert busy_ms == pytest.approx(128 / 8 * 0.9 * ROW_BYTES * LINK.ms_per_byte)
    printed = msgspec.structs.replace(LINK, deduplicated=False)
    three, fewer = (link_ms(printed, 2, spread(copies, 1.0), "a2e") for copies in (3.0, 1.5))
    assert three == fewer


def test_load_scales_expert_compute_and_slots_scale_launch() -> None:
    even, late = spread(3.0, 1.0), spread(3.0, 1.5)._replace(slots=40)
    one, other = expert_model(H200, QWEN, even), expert_model(H200, QWEN, late)
    assert other.beta_ms == pytest.approx(1.5 * one.beta_ms)
    assert other.alpha_ms - one.alpha_ms == pytest.approx(
        8 * (expert_model(H200, QWEN, even._replace(slots=1)).alpha_ms - H200.expert.call_ms)
    )


def test_spare_slots_and_copies_are_in_the_memory_of_a_rank() -> None:
    usable_bytes = 1e12
    lean = rank_memories(QWEN, split(2, 4), usable_bytes, spread(1.5, 1.0))
    full = rank_memories(QWEN, split(2, 4), usable_bytes, spread(3.0, 1.0)._replace(slots=40))
    slot_bytes = QWEN.moe_layers * QWEN.expert_elements * QWEN.element_bytes
    assert full[1].weight_bytes - lean[1].weight_bytes == 8 * slot_bytes
    assert full[0].sample_bytes - lean[0].sample_bytes == 2048 * 2 * 1.5 * ROW_BYTES
    assert full[1].sample_bytes == 2 * lean[1].sample_bytes


@given(
    st.lists(st.tuples(st.floats(1, 4), st.floats(1, 4)), min_size=1, max_size=6), st.floats(0, 1e4)
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
    assert routing.is_even == (len(set(routing.layers)) == 1)
    even = RoutingShape(routing.layers[:1] * 3)
    assert even.is_even
    assert even.mean == even.layers[0]
