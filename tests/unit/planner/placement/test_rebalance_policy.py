"""Rebalancing: steps that pay and fit, unique generations, no thrashing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contracts.config import PlacementConfig
from contracts.placement import Placement
from planner.placement.rebalance_policy import (
    MoveCosts,
    RebalancePolicy,
    RebalanceStep,
    find_rebalance_step,
)
from planner.placement.routing import MOST_TOKENS, WINDOW_S, RoutingWindow, WindowRouting, measure
from planner.placement.slots import layer_slots

E, LAYERS, K = 8, 3, 2
COSTS = MoveCosts(expert_bytes=1000, pair_ms=0.005, copy_ms=0.02)
CONFIG = PlacementConfig(rebalance="continuous")
# Of two kinds of text: experts that go together, which contiguous halves tear apart. Together they
# are one ring of eight: no two halves suit both.
PAIRS = {
    "one": [(0, 4), (1, 5), (2, 6), (3, 7)],
    "other": [(4, 1), (5, 2), (6, 3), (7, 0)],
    # of two more, some experts are much hotter
    "front": [(0, 4), (1, 5), (0, 4), (1, 5)],
    "back": [(4, 1), (7, 0), (7, 0), (7, 0)],
}


def paths_of(kind: str, tokens: int, seed: int) -> NDArray[np.int16]:
    random = np.random.default_rng(seed)
    return np.array(PAIRS[kind], np.int16)[random.integers(0, 4, (tokens, LAYERS))]


def routing_of(*kinds: str, tokens: int = 2048, per_s: float = 2000.0) -> WindowRouting:
    """Return equally long runs of each kind."""
    each = [paths_of(kind, tokens // len(kinds), seed) for seed, kind in enumerate(kinds)]
    paths_PLK = np.concatenate(each)
    return WindowRouting(E, per_s, np.arange(len(paths_PLK), dtype=np.int32) % 50, paths_PLK)


def placement(*, spare: int = 0, ranks: int = 2) -> Placement:
    """Return experts in order; layer 0 has none; spare slots have the first missing experts."""
    share = E // ranks
    line: list[int] = []
    for rank in range(ranks):
        own = list(range(rank * share, (rank + 1) * share))
        line += own + [expert for expert in range(E) if expert not in own][:spare]
    lines = ((), *(tuple(line) for _ in range(LAYERS)))
    return Placement(num_experts=E, slots_per_rank=(share + spare,) * ranks, expert_of_slot=lines)


def step_of(
    routing: WindowRouting, placed: Placement, *, config: PlacementConfig = CONFIG, **options: Any
) -> RebalanceStep | None:
    arguments = {"costs": COSTS, "generation": 1, **options}
    return find_rebalance_step(routing, placed, config=config, **arguments)


def copies(kind: str, placed: Placement) -> float:
    routing = routing_of(kind)
    lines = placed.expert_of_slot[1:]
    return float(
        np.mean([
            measure(routing.layer(n), layer_slots(line, placed.slots_per_rank)).copies
            for n, line in enumerate(lines)
        ])
    )  # fmt: skip


def loads_of(before: Placement, after: Placement) -> list[int]:
    """Return the experts that each rank loads."""
    return [
        sum(
            len(set(new) - set(before.experts_of(rank)[layer]))
            for layer, new in after.experts_of(rank).items()
        )
        for rank in range(before.ranks)
    ]


@pytest.mark.parametrize("costs", [COSTS, MoveCosts(expert_bytes=1000)], ids=["costs", "default"])
def test_coactivated_experts_are_placed_together(costs: MoveCosts) -> None:
    step = step_of(routing_of("one"), placement(), costs=costs)
    assert step is not None
    assert copies("one", placement()) == 2.0
    assert copies("one", step.placement) == 1.0
    assert (step.is_whole, step.placement.generation) == (True, 1)
    assert step.gain_fraction > 0.1
    again = step_of(routing_of("one"), step.placement, costs=costs)
    assert again is None, "the traffic suits the placement"


def test_gain_on_the_newer_half_alone_moves_nothing() -> None:
    step = step_of(routing_of("one"), placement())
    assert step is not None
    assert step_of(routing_of("one", "other"), step.placement) is None
    whole = step_of(routing_of("other"), step.placement)
    assert whole is not None
    assert copies("other", whole.placement) == 1.0


def test_unreached_layers_are_unchanged() -> None:
    replies = iter([True, False])
    cut = step_of(routing_of("one"), placement(), should_continue=lambda: next(replies))
    assert cut is not None
    lines = zip(cut.placement.expert_of_slot[1:], placement().expert_of_slot[1:], strict=True)
    assert (sum(new != old for new, old in lines), cut.is_whole) == (1, False)


@pytest.mark.parametrize(
    ("per_s", "payback_s", "moves"),
    [(2000.0, 60.0, True), (0.001, 60.0, False), (2000.0, 1e-4, False)],
    ids=["much traffic", "hardly any traffic", "too soon"],
)
def test_move_must_save_more_than_it_costs(per_s: float, payback_s: float, moves: bool) -> None:
    """Loading two experts of 1 MB per rank and layer takes 20 ms."""
    config = PlacementConfig(rebalance="continuous", payback_s=payback_s)
    costs = COSTS._replace(expert_bytes=1_000_000)
    step = step_of(routing_of("one", per_s=per_s), placement(), costs=costs, config=config)
    assert (step is not None) == moves


@pytest.mark.long
@given(st.integers(0, 12), st.integers(0, 2), st.sampled_from([2, 4]), st.sampled_from(list(PAIRS)))
@settings(max_examples=12, deadline=None)
def test_each_step_gains_within_move_bytes(most: int, spare: int, ranks: int, kind: str) -> None:
    current = placement(spare=spare, ranks=ranks)
    config = PlacementConfig(rebalance="continuous", max_move_bytes=most * 1000 + 1)
    for generation in range(1, 20):
        step = step_of(routing_of(kind), current, config=config, generation=generation)
        if step is None:
            return
        loads = loads_of(current, step.placement)
        assert 0 < max(loads) <= most
        assert max(loads) * 1000 == step.load_bytes
        assert step.gain_fraction > 0
        current = step.placement
    raise AssertionError("steps without an end")


class Clockwork:
    """A group whose moves take half a second, and a policy, on a simulated clock."""

    def __init__(self, config: PlacementConfig = CONFIG) -> None:
        self.window = RoutingWindow(E, LAYERS, K, vocab_size=50)
        self.policy = RebalancePolicy(placement(), config)
        self.config, self.now_s = config, 0.0
        self.steps: list[tuple[float, RebalanceStep]] = []
        self.answers = True

    def run(self, kind: str, seconds: float) -> None:
        """128 sampled tokens each half second."""
        ids = np.stack([np.arange(128) % 50, np.full(128, -1)], axis=1).astype("<i4").tobytes()
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            paths = paths_of(kind, 128, round(2 * self.now_s))
            self.window.add(self.now_s, 1280, ids, paths.astype("<i2").tobytes())
            self._poll()

    def _poll(self) -> None:
        policy, routing = self.policy, self.window.routing(self.now_s)
        if self.steps and policy.pending and self.answers:
            sent_s, sent = self.steps[-1]
            if self.now_s >= sent_s + 0.5:
                for rank in range(2):
                    policy.record_retired(f"expert-{rank}", sent.placement.generation, self.now_s)
        if not policy.is_due(self.now_s, routing):
            return
        generation = policy.newest + 1
        step = step_of(routing, policy.current, config=self.config, generation=generation)
        if step is None:
            policy.record_no_step(self.now_s)
            return
        policy.record_proposal(step, self.now_s)
        self.steps.append((self.now_s, step))


def test_changed_traffic_moves_experts_within_a_window() -> None:
    group = Clockwork()
    group.run("one", 30)
    assert copies("one", group.policy.current) == 1.0
    group.run("other", 30)
    assert copies("other", group.policy.current) == 1.0
    turned = [at_s for at_s, _ in group.steps if at_s > 30]
    assert 30 < turned[0] <= 30 + WINDOW_S + 2


@pytest.mark.long
@pytest.mark.parametrize("turn_s", [1, 3, 5])
def test_alternating_traffic_moves_experts_at_most_once_a_window(turn_s: int) -> None:
    group = Clockwork()
    for _ in range(120 // turn_s):
        group.run("one", turn_s)
        group.run("other", turn_s)
    assert len(group.steps) <= group.now_s / WINDOW_S


def test_generations_are_used_once_and_grow() -> None:
    group = Clockwork()
    group.policy.record_held(placement(), newest=41)  # one that failed, before this planner began
    for kind in ("one", "other", "one"):
        group.run(kind, 60)
    numbers = [step.placement.generation for _, step in group.steps]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 42


def test_off_proposes_no_step_and_once_stops_after_one_complete_change() -> None:
    for rebalance, most_bytes, steps in (
        ("off", 1 << 30, 0),
        ("once", 1 << 30, 1),
        ("once", 2500, LAYERS),
    ):
        config = PlacementConfig(rebalance=rebalance, max_move_bytes=most_bytes)  # type: ignore[arg-type]
        group = Clockwork(config)
        for kind in ("one", "other", "one"):
            group.run(kind, 60)
            assert len(group.steps) == steps
    assert copies("one", group.policy.current) == 1.0


def test_proposal_times_out_and_a_late_outcome_is_accepted() -> None:
    group = Clockwork(PlacementConfig(rebalance="continuous", move_timeout_s=10.0))
    group.answers = False
    group.run("one", 40)
    assert len(group.steps) == 2  # again after its time, and a rest
    first = group.steps[0][1].placement
    for rank, current in ((0, placement()), (0, placement()), (1, first)):  # all must retire theirs
        group.policy.record_retired(f"expert-{rank}", first.generation, group.now_s)
        assert group.policy.current == current


def test_window_is_bounded_in_time_and_tokens() -> None:
    window = RoutingWindow(E, LAYERS, K, vocab_size=50)

    def add(now_s: float, tokens: int) -> None:
        ids = np.zeros((tokens, 2), "<i4")
        window.add(now_s, tokens, ids.tobytes(), paths_of("one", tokens, 0).tobytes())

    for second in range(100):
        add(float(second), 1000)
        assert window.routing(float(second)).sampled <= MOST_TOKENS
    assert window.routing(99.0).tokens_per_s == pytest.approx(1000)
    assert window.routing(99.0 + 2 * WINDOW_S).sampled == 0
    add(200.0, 3 * MOST_TOKENS)
    assert window.routing(200.0).sampled == MOST_TOKENS


@pytest.mark.parametrize(
    ("ids", "paths", "message"),
    [
        pytest.param([[1, -1]], [[[0, 8]] * 3], "experts 0 to 8 of 8", id="no such expert"),
        pytest.param([[1, -1]], [[[-1, 2]] * 3], "experts -1 to 2", id="negative expert"),
        pytest.param([[1, -1]], [[[3, 3]] * 3], "an expert twice", id="twice"),
        pytest.param([[50, -1]], [[[0, 1]] * 3], "vocabulary of 50", id="no such token"),
        pytest.param([[-1, -1]], [[[0, 1]] * 3], "token ids -1", id="no token"),
        pytest.param([[1, -1]] * 2, [[[0, 1]] * 3], "16 bytes of ids and 12", id="too short"),
        pytest.param([[1, -1]], [[[0, 1]] * 4], "8 bytes of ids and 16", id="too many layers"),
        pytest.param([[1, -1]] * 3, [[[0, 1]] * 3] * 3, "3 tokens are sampled of 2", id="more"),
    ],
)
def test_invalid_report_is_rejected(
    ids: list[list[int]], paths: list[list[list[int]]], message: str
) -> None:
    window = RoutingWindow(E, LAYERS, K, vocab_size=50)
    with pytest.raises(ValueError, match=message):
        window.add(0.0, 2, np.array(ids, "<i4").tobytes(), np.array(paths, "<i2").tobytes())
    assert window.routing(0.0).sampled == 0
