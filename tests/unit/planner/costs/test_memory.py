"""Samples that fit a device; times with experts read from host memory; prefill modes."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.fleet.hardware import load_hardware
from contracts.errors import ResourceError
from contracts.hardware import LinkCost
from planner.costs.cost_model import attention_ms, expert_model
from planner.costs.memory import max_samples, rank_memories
from planner.costs.model_shape import ModelShape, layer_mean_work
from planner.costs.prefill_modes import (
    PrefillGroup,
    PrefillMode,
    Tier,
    active_experts,
    batch_seconds,
    break_even_tokens,
    most_sequences,
    offloaded_token,
)
from planner.costs.routing_shape import RankShare, RoutingShape, Spread, uniform, uniform_spread
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, small_shapes, split

GIB = 1 << 30
some = settings(deadline=None, max_examples=60)


def test_memory_is_of_new_and_cached_tokens_of_all_layers_and_of_235_billion_parameters() -> None:
    assert shape(QWEN3_235B).kv_token_bytes == 94 * 2 * 4 * 128 * 2
    assert shape(DEEPSEEK_V2).kv_token_bytes == 60 * (512 + 64) * 2
    cached, new = (rank_memories(shape(QWEN3_235B), s, 1e12)[0].sample_bytes
                   for s in (split(tokens=100, context=900), split(tokens=100)))  # fmt: skip
    assert cached - new == 900 * 94 * 2 * 4 * 128 * 2
    attention, expert = rank_memories(shape(QWEN3_235B), split(1, 8), 141e9)
    assert (attention.weight_bytes + 8 * expert.weight_bytes) / 2 == pytest.approx(235e9, rel=0.01)


@some
@given(small_shapes, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4096))
def test_max_samples_and_no_more_fit(model: ModelShape, ag: int, eg: int, tokens: int) -> None:
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
def test_advised_length_is_the_longest_to_fit(model: ModelShape, tokens: int, gib: float) -> None:
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


def test_too_few_ranks_are_rejected_with_a_number_that_fits_and_small_devices() -> None:
    model = shape(QWEN3_235B)
    with pytest.raises(ResourceError, match=r"expert_ranks.* or more would fit") as caught:
        max_samples(model, split(1, 2), 100.0 * GIB)
    advised = re.search(r"(\d+) or more would fit", caught.value.message)
    assert advised is not None
    assert max_samples(model, split(1, int(advised[1])), 100.0 * GIB) >= 1
    for gib, message in ((1.0, "attention rank's weights are"), (0.001, "give devices with more")):
        with pytest.raises(ResourceError, match=message):
            max_samples(model, split(), gib * GIB)


H200, QWEN = load_hardware("h200-node"), shape(QWEN3_235B)


@given(
    kept=st.floats(0.0, 0.99),
    rate=st.floats(1e8, 1e12),
    sequences=st.integers(1, 64),
    hits=st.none() | st.floats(0, 1),
)
def test_read_ahead_time_is_between_resident_and_on_demand(
    kept: float, rate: float, sequences: int, hits: float | None
) -> None:
    found = offloaded_token(H200, QWEN, Tier(kept, rate, hits), sequences, 1024)
    assert found.resident_ms <= found.ahead_ms * (1 + 1e-9)
    assert found.ahead_ms <= found.on_demand_ms * (1 + 1e-9)
    assert found.on_demand_ms <= 2 * found.ahead_ms  # Eq. 1: at most half is gained


def test_read_ahead_gain_with_equal_read_and_compute_times() -> None:
    """Speculating Experts, Eq. 1."""
    compute_ms = offloaded_token(H200, QWEN, Tier(0.0, 1e30), 1, 1024).resident_ms
    bytes_read = QWEN.moe_layers * QWEN.top_k * QWEN.expert_elements * QWEN.element_bytes
    found = offloaded_token(H200, QWEN, Tier(0.0, 1e3 * bytes_read / compute_ms), 1, 1024)
    layers = QWEN.moe_layers
    assert found.on_demand_ms == pytest.approx(2 * compute_ms)
    assert found.ahead_ms == pytest.approx(compute_ms * (layers + 1) / layers)


def test_stored_format_holds_more_experts_and_reads_faster_as_does_a_faster_disk() -> None:
    computed = offloaded_token(H200, QWEN, Tier(0.25, 1e9), 1, 64)
    tier = Tier(0.25, 1e9, stored_fraction=0.5)
    stored = offloaded_token(H200, QWEN, tier, 1, 64)
    fast = offloaded_token(H200, QWEN, Tier(0.25, 2e9), 1, 64)
    assert tier.held == 0.5
    assert stored.missing == pytest.approx(QWEN.top_k / 2)
    adds = computed.on_demand_ms - computed.resident_ms
    assert stored.on_demand_ms - stored.resident_ms == pytest.approx(adds / 2 * (0.5 / 0.75))
    assert fast.on_demand_ms - fast.resident_ms == pytest.approx(adds / 2)
    assert offloaded_token(H200, QWEN, Tier(0.5, 1e9, None, 0.5), 64, 64).missing == 0.0


@pytest.mark.parametrize("kept", [0.05, 0.25, 0.5, 0.9])
def test_most_sequences_is_the_largest_that_fits(kept: float) -> None:
    share = QWEN.top_k / QWEN.num_experts
    for tokens in (1, 2, 1000):
        active = QWEN.num_experts * (1 - (1 - share) ** tokens)
        assert active_experts(QWEN, tokens) == pytest.approx(active)
    most = most_sequences(QWEN, kept)
    if most:
        assert active_experts(QWEN, most) <= kept * QWEN.num_experts * (1 + 1e-9)
    assert active_experts(QWEN, most + 1) > kept * QWEN.num_experts
    if kept == 0.5:  # a larger step hits no expert
        within, beyond = (
            offloaded_token(H200, QWEN, Tier(kept, 1e9), n, 64) for n in (most, most + 1)
        )
        assert within.missing == pytest.approx(kept * active_experts(QWEN, most))
        assert beyond.missing == pytest.approx(active_experts(QWEN, most + 1))


# The bundled model's: 16 experts of 3 * 192 * 96 elements, top-2, in bfloat16.
BUNDLED = shape(
    QWEN3_235B, hidden_size=192, num_hidden_layers=5, num_experts=16, num_experts_per_tok=2,
    moe_intermediate_size=96,
)  # fmt: skip
LAYER_BYTES, ROW_BYTES = 16 * 3 * 192 * 96 * 2, 192 * 2
RESIDENT, GATHERED, ALL_TO_ALL = PrefillMode
SLOW = 1.0  # ms for a byte: nothing but the link counts
batches = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda c: (c[0], c[0] + c[1])),
    min_size=1,
    max_size=5,
)


def group(
    ms_per_byte: float,
    *,
    workers: int = 2,
    routing: RoutingShape | None = None,
    model: ModelShape = BUNDLED,
    alpha_ms: float = 0.0,
) -> PrefillGroup:
    link = LinkCost(backend="nccl", direction="both", alpha_ms=alpha_ms, ms_per_byte=ms_per_byte)
    return PrefillGroup(model, H200, workers, link, link, routing or uniform(model, workers))


def placed(remote_copies: float, load: float = 1.0) -> RoutingShape:
    """Return routing on two workers; remote_copies: copies that leave a token's worker."""
    mean, busiest = RankShare(0.7, 8.0), RankShare(0.7, 8.0 * load)
    return RoutingShape((Spread(2, 8, mean, busiest, 2 - remote_copies / 0.7),))


def compute_ms(model: ModelShape, tokens: int, spread: Spread, senders: int) -> float:
    attention = attention_ms(H200.attention, model, layer_mean_work(model, 0, tokens))
    me = senders * tokens * model.top_k / model.num_experts
    return attention + expert_model(H200, model, spread).at(me)


def test_gathered_batch_waits_for_all_layers_but_the_first() -> None:
    """3 of 4 parts of a layer's experts in 3 messages; resident experts wait for nothing."""
    whole = 94 * compute_ms(QWEN, 2048, uniform_spread(QWEN, 1), 1) / 1e3
    found = batch_seconds(RESIDENT, [(0, 2048)], group(1e-8, model=QWEN))
    assert found == pytest.approx(whole)
    slow = group(SLOW, workers=4, alpha_ms=7.0)
    gather_ms = 3 * 7.0 + 3 / 4 * LAYER_BYTES * SLOW
    compute = compute_ms(BUNDLED, 100, uniform_spread(BUNDLED, 1), 1)
    found = 1e3 * batch_seconds(GATHERED, [(0, 100)], slow)
    assert found == pytest.approx(compute + 4 * gather_ms)
    fast = group(1e-12, workers=4)
    times_s = [batch_seconds(way, [(0, 100)], fast) for way in (GATHERED, RESIDENT)]
    assert times_s[0] == pytest.approx(times_s[1])


def test_exchange_sends_remote_copies_both_ways() -> None:
    """0.5 remote copies a token, with the metadata of its pairs."""
    pairs = 100 * 2 / 2 * (0.5 / 0.7)
    moved_ms = (2 * 100 * 0.5 * ROW_BYTES + 8 * pairs) * SLOW
    found_s = batch_seconds(ALL_TO_ALL, [(0, 100)], group(SLOW, routing=placed(0.5)))
    assert 1e3 * found_s == pytest.approx(5 * moved_ms, rel=1e-5)


def test_exchange_overlaps_half_batches() -> None:
    """On a link that takes as long as compute."""
    fast = group(1e-12, model=QWEN, workers=8)
    batch = [(0, 4096)] * 4
    alone_s = batch_seconds(ALL_TO_ALL, batch, fast)
    slow = group(SLOW, model=QWEN, workers=8)
    per_byte = alone_s / batch_seconds(ALL_TO_ALL, batch, slow) * SLOW
    both_s = batch_seconds(ALL_TO_ALL, batch, group(per_byte, model=QWEN, workers=8))
    assert alone_s < both_s < 1.6 * alone_s


@pytest.mark.parametrize(
    ("routing", "tokens"),
    [(placed(0.740), 1560), (placed(0.630), 1830)],
    ids=["contiguous", "grouped and routed"],
)
def test_break_even_matches_measurements(routing: RoutingShape, tokens: int) -> None:
    """Measured: a layer's bytes, rows only. Here the first layer is present, pairs add 8 bytes."""
    found = break_even_tokens(group(SLOW, routing=routing), GATHERED, ALL_TO_ALL)
    assert found is not None
    remote = routing.mean.copies * (2 - routing.mean.at_home) / 2
    pairs_bytes = 2 * 8 * (2 - routing.mean.at_home) / 2
    more = 1 + pairs_bytes / (2 * remote * ROW_BYTES)
    assert found * 5 / 4 * more == pytest.approx(tokens, rel=0.02)


def test_no_break_even_if_one_mode_always_wins() -> None:
    fast = group(1e-12)
    assert break_even_tokens(fast, RESIDENT, GATHERED) == 1
    assert break_even_tokens(group(SLOW), ALL_TO_ALL, RESIDENT) is None
    alone = group(SLOW, workers=1)  # a single worker exchanges no bytes
    seconds = [batch_seconds(way, [(0, 300), (20, 90)], alone) for way in PrefillMode]
    assert seconds == pytest.approx([seconds[0]] * 3)


@given(batches, st.floats(0.01, 1.39), st.floats(1.0, 2.0), st.sampled_from([1e-6, 1e-3]))
def test_less_exchange_and_load_are_never_slower(
    batch: list[tuple[int, int]], remote: float, load: float, ms_per_byte: float
) -> None:
    worse, better = (
        batch_seconds(ALL_TO_ALL, batch, group(ms_per_byte, routing=routing))
        for routing in (placed(remote, load), placed(remote / 2))
    )
    assert better <= worse * (1 + 1e-12)


@given(batches, st.sampled_from(list(PrefillMode)), st.sampled_from([1e-9, 1e-6, 1e-3]))
def test_more_tokens_never_take_less_time_nor_gathered_less_than_resident(
    batch: list[tuple[int, int]], way: PrefillMode, ms_per_byte: float
) -> None:
    one = group(ms_per_byte, alpha_ms=0.01)
    start, stop = batch[0]
    assert batch_seconds(way, [], one) == 0.0
    before = batch_seconds(way, batch, one)
    assert 0 < before <= batch_seconds(way, [*batch, (0, 7)], one) * (1 + 1e-12)
    assert before <= batch_seconds(way, [(start, stop + 5), *batch[1:]], one) * (1 + 1e-12)
    gathered_s = batch_seconds(GATHERED, batch, one)
    assert batch_seconds(RESIDENT, batch, one) <= gathered_s
