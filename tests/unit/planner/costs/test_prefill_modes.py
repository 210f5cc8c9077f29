"""Prefill batch times per mode against hand-made sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fleet.hardware import load_hardware
from contracts.hardware import LinkCost
from planner.costs.cost_model import attention_ms, expert_model
from planner.costs.model_shape import ModelShape, layer_mean_work
from planner.costs.prefill_modes import PrefillGroup, PrefillMode, batch_seconds, break_even_tokens
from planner.costs.routing_shape import RankShare, RoutingShape, Spread, uniform, uniform_spread
from tests.support.model_shapes import QWEN3_235B, shape

H200, QWEN = load_hardware("h200-node"), shape(QWEN3_235B)
# The bundled model's: 16 experts of 3 * 192 * 96 elements, top-2, in bfloat16.
BUNDLED = shape(
    QWEN3_235B,
    hidden_size=192,
    num_hidden_layers=5,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
)
LAYER_BYTES, ROW_BYTES = 16 * 3 * 192 * 96 * 2, 192 * 2
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
    share = RankShare(0.7, 8.0)
    at_home = 2 - remote_copies / 0.7
    return RoutingShape((Spread(2, 8, share, RankShare(0.7, 8.0 * load), at_home),))


def compute_ms(model: ModelShape, tokens: int, spread: Spread, senders: int) -> float:
    attention = attention_ms(H200.attention, model, layer_mean_work(model, 0, tokens))
    me = senders * tokens * model.top_k / model.num_experts
    return attention + expert_model(H200, model, spread).at(me)


def test_resident_batch_time_is_compute_only() -> None:
    whole = 94 * compute_ms(QWEN, 2048, uniform_spread(QWEN, 1), 1) / 1e3
    found = batch_seconds(PrefillMode.RESIDENT, [(0, 2048)], group(1e-8, model=QWEN))
    assert found == pytest.approx(whole)


def test_gathered_batch_waits_for_all_layers_but_the_first() -> None:
    """3 of 4 parts of a layer's experts in 3 messages."""
    slow = group(SLOW, workers=4, alpha_ms=7.0)
    gather_ms = 3 * 7.0 + 3 / 4 * LAYER_BYTES * SLOW
    compute = compute_ms(BUNDLED, 100, uniform_spread(BUNDLED, 1), 1)
    found = 1e3 * batch_seconds(PrefillMode.GATHERED, [(0, 100)], slow)
    assert found == pytest.approx(compute + 4 * gather_ms)
    fast = group(1e-12, workers=4)
    assert batch_seconds(PrefillMode.GATHERED, [(0, 100)], fast) == pytest.approx(
        batch_seconds(PrefillMode.RESIDENT, [(0, 100)], fast)
    )


def test_exchange_sends_remote_copies_both_ways() -> None:
    """0.5 remote copies a token, with the metadata of its pairs."""
    pairs = 100 * 2 / 2 * (0.5 / 0.7)
    moved_ms = (2 * 100 * 0.5 * ROW_BYTES + 8 * pairs) * SLOW
    found = 1e3 * batch_seconds(
        PrefillMode.ALL_TO_ALL, [(0, 100)], group(SLOW, routing=placed(0.5))
    )
    assert found == pytest.approx(5 * moved_ms, rel=1e-5)


def test_exchange_overlaps_half_batches() -> None:
    """On a link that takes as long as compute."""
    fast = group(1e-12, model=QWEN, workers=8)
    batch = [(0, 4096)] * 4
    alone_s = batch_seconds(PrefillMode.ALL_TO_ALL, batch, fast)
    slow = group(SLOW, model=QWEN, workers=8)
    per_byte = alone_s / batch_seconds(PrefillMode.ALL_TO_ALL, batch, slow) * SLOW
    both_s = batch_seconds(PrefillMode.ALL_TO_ALL, batch, group(per_byte, model=QWEN, workers=8))
    assert alone_s < both_s < 1.6 * alone_s


@pytest.mark.parametrize(
    ("routing", "tokens"),
    [(placed(0.740), 1560), (placed(0.630), 1830)],
    ids=["contiguous", "grouped and routed"],
)
def test_break_even_matches_measurements(routing: RoutingShape, tokens: int) -> None:
    """Measured: a layer's bytes, rows only. Here the first layer is present, pairs add 8 bytes."""
    found = break_even_tokens(
        group(SLOW, routing=routing), PrefillMode.GATHERED, PrefillMode.ALL_TO_ALL
    )
    assert found is not None
    remote = routing.mean.copies * (2 - routing.mean.at_home) / 2
    pairs_bytes = 2 * 8 * (2 - routing.mean.at_home) / 2
    more = 1 + pairs_bytes / (2 * remote * ROW_BYTES)
    assert found * 5 / 4 * more == pytest.approx(tokens, rel=0.02)


def test_no_break_even_if_one_mode_always_wins() -> None:
    fast = group(1e-12)
    assert break_even_tokens(fast, PrefillMode.RESIDENT, PrefillMode.GATHERED) == 1
    assert break_even_tokens(group(SLOW), PrefillMode.ALL_TO_ALL, PrefillMode.RESIDENT) is None


def test_single_worker_exchanges_no_bytes() -> None:
    alone = group(SLOW, workers=1)
    seconds = [batch_seconds(way, [(0, 300), (20, 90)], alone) for way in PrefillMode]
    assert seconds == pytest.approx([seconds[0]] * 3)


@given(batches, st.sampled_from(list(PrefillMode)), st.sampled_from([1e-9, 1e-6, 1e-3]))
def test_more_tokens_never_take_less_time(
    batch: list[tuple[int, int]], way: PrefillMode, ms_per_byte: float
) -> None:
    one = group(ms_per_byte, alpha_ms=0.01)
    start, stop = batch[0]
    assert batch_seconds(way, [], one) == 0.0
    before = batch_seconds(way, batch, one)
    assert 0 < before <= batch_seconds(way, [*batch, (0, 7)], one) * (1 + 1e-12)
    assert before <= batch_seconds(way, [(start, stop + 5), *batch[1:]], one) * (1 + 1e-12)


@given(batches, st.floats(0.01, 1.39), st.floats(1.0, 2.0), st.sampled_from([1e-6, 1e-3]))
def test_less_exchange_and_load_are_never_slower(
    batch: list[tuple[int, int]], remote: float, load: float, ms_per_byte: float
) -> None:
    worse = batch_seconds(
        PrefillMode.ALL_TO_ALL, batch, group(ms_per_byte, routing=placed(remote, load))
    )
    better = batch_seconds(
        PrefillMode.ALL_TO_ALL, batch, group(ms_per_byte, routing=placed(remote / 2))
    )
    assert better <= worse * (1 + 1e-12)


@given(batches, st.floats(1e-9, 1e-3))
def test_resident_mode_is_the_lower_bound(batch: list[tuple[int, int]], ms_per_byte: float) -> None:
    one = group(ms_per_byte)
    assert batch_seconds(PrefillMode.RESIDENT, batch, one) <= batch_seconds(
        PrefillMode.GATHERED, batch, one
    )
