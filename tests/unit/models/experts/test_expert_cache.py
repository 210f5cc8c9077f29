"""The cache of experts: what is wanted comes, in whatever order, and slots are whole afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.requests import Priority
from models.experts.expert_cache import ExpertCache, Guess, Want
from models.experts.expert_file import SlotMemory
from models.experts.expert_layout import ExpertLayout
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint
from planner.policies.eviction import Kind, eviction
from planner.policies.read_ahead import pays

Checkpoints = Callable[..., Path]
LAYERS, EXPERTS, PARTS, DEADLINE_S = 3, 4, 2, 20.0
LS, BE = Priority


class FakeTier:
    """Fills a part of an expert with its number. `read`: parts so far; gate: opened for each."""

    parts, expert_bytes = PARTS, 100

    def __init__(self) -> None:
        self.read: list[tuple[int, int, int]] = []
        self.gate: threading.Semaphore | None = None
        self.broken: set[tuple[int, int]] = set()
        self.closed = False
        self._changed = threading.Condition()

    def reader(self) -> FakeReader:
        return FakeReader(self)

    def close(self) -> None:
        self.closed = True

    def __str__(self) -> str:
        return "the disk"

    def fill(self, layer: int, expert: int, part: int, into: SlotMemory) -> None:
        if self.gate is not None:
            assert self.gate.acquire(timeout=DEADLINE_S)
        if (layer, expert) in self.broken:
            raise ChannelError(f"expert {expert} of layer {layer} is broken")
        for tensor in into:
            half = len(tensor) // PARTS
            tensor[part * half : (part + 1) * half] = number_of(layer, expert)
        with self._changed:
            self.read.append((layer, expert, part))
            self._changed.notify_all()

    def experts_read(self, count: int) -> list[tuple[int, int]]:
        """The first so many, in the order in which their last part was read."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.read) >= count * PARTS, DEADLINE_S)
        return [(layer, expert) for layer, expert, part in self.read if part == PARTS - 1][:count]


class FakeReader:
    def __init__(self, tier: FakeTier) -> None:
        self._tier = tier

    def read(self, layer: int, expert: int, part: int, into: SlotMemory) -> None:
        self._tier.fill(layer, expert, part, into)


def number_of(layer: int, expert: int) -> int:
    return 1 + layer * EXPERTS + expert


@pytest.fixture(scope="module")
def layout(tiny_checkpoint: Checkpoints) -> ExpertLayout:
    model: ModelSpec = check_checkpoint(tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS))
    return ExpertLayout(model, torch.float32, torch.device("cpu"))


@contextmanager
def opened(
    layout: ExpertLayout,
    slots: int,
    tier: FakeTier,
    *,
    kind: Kind = "lru",
    deadline_s: float = DEADLINE_S,
) -> Iterator[ExpertCache]:
    order = eviction(kind, slots, {})
    cache = ExpertCache(tier, layout, slots, order, pays, deadline_s=deadline_s)
    try:
        yield cache
        cache.check()
    finally:
        if tier.gate is not None:
            tier.gate.release(1000)
        cache.close()


def compute(cache: ExpertCache, want: Want, most: int = 1) -> list[int]:
    """The experts of a want, in the order in which they were computed with; each is what it
    should be."""
    order: list[int] = []
    pairs = dict.fromkeys(range(EXPERTS), 1)
    while want.left:
        taken = cache.take(want, pairs, most)
        for expert, slot in taken:
            memory = cache._memory[slot]
            assert all((tensor == number_of(want.layer, expert)).all() for tensor in memory)
            order.append(expert)
        if taken:
            cache.done(want, taken)
        else:
            cache.wait(0.05)
    return order


@pytest.mark.parametrize("kind", ["lru", "lfu", "walk", "pinned"])
def test_a_layer_that_wants_more_than_there_are_slots_comes_in_waves(
    layout: ExpertLayout, kind: Kind
) -> None:
    with opened(layout, 2, FakeTier(), kind=kind) as cache:
        for layer in (0, 1, 2, 0):
            want = cache.want(layer, range(EXPERTS), LS)
            assert sorted(compute(cache, want)) == list(range(EXPERTS))


def test_what_is_there_is_not_read_again_and_counts_as_a_hit(layout: ExpertLayout) -> None:
    tier = FakeTier()
    with opened(layout, 4, tier) as cache:
        for _ in range(3):
            compute(cache, cache.want(1, [0, 3], LS))
        assert len(tier.read) == 2 * PARTS
        traffic = cache.traffic
        assert (traffic.hits[1], traffic.wanted[1]) == (4, 6)
        assert traffic.demand_bytes == 2 * tier.expert_bytes


def test_what_has_come_is_computed_with_while_the_rest_is_read(layout: ExpertLayout) -> None:
    tier = FakeTier()
    with opened(layout, 4, tier) as cache:
        compute(cache, cache.want(0, [1], LS))
        tier.gate = threading.Semaphore(0)
        want = cache.want(0, [0, 1, 2], LS)
        assert want.can_go_on
        taken = cache.take(want, dict.fromkeys(range(EXPERTS), 1), 9)
        assert [expert for expert, _ in taken] == [1]
        cache.done(want, taken)
        assert not want.can_go_on
        tier.gate.release(2 * PARTS)
        assert sorted(compute(cache, want)) == [0, 2]


def test_what_is_taken_at_once_stands_side_by_side_in_what_was_wanted(
    layout: ExpertLayout,
) -> None:
    tier, pairs = FakeTier(), dict.fromkeys(range(EXPERTS), 1)
    with opened(layout, 4, tier) as cache:
        compute(cache, cache.want(0, [1, 3], LS))
        tier.gate = threading.Semaphore(0)
        want = cache.want(0, range(EXPERTS), LS)
        first = cache.take(want, pairs, 9)
        assert [expert for expert, _ in first] == [1]
        cache.done(want, first)
        tier.gate.release(1000)
        tier.experts_read(4)
        while len(want.ready) < 3:
            cache.wait(0.01)
        runs = []
        while want.left:
            runs.append(cache.take(want, pairs, 9))
            cache.done(want, runs[-1])
        assert [[expert for expert, _ in run] for run in runs] == [[0], [2, 3]]


def test_ls_is_read_before_be_and_takes_its_slots(layout: ExpertLayout) -> None:
    tier = FakeTier()
    tier.gate = threading.Semaphore(0)
    with opened(layout, 2, tier) as cache:
        be = cache.want(0, [0, 1], BE)
        ls = cache.want(1, [2, 3], LS)
        tier.gate.release(1000)
        assert sorted(compute(cache, ls)) == [2, 3]
        assert sorted(compute(cache, be)) == [0, 1]


def test_hints_are_read_best_guess_first_and_only_after_what_is_wanted(
    layout: ExpertLayout,
) -> None:
    tier = FakeTier()
    tier.gate = threading.Semaphore(0)
    with opened(layout, 6, tier) as cache:
        cache.want(0, [0], LS)
        cache.hint("me", 1, [Guess(1, 0.2), Guess(2, 0.9), Guess(3, 0.5)])
        tier.gate.release(1000)
        read = tier.experts_read(4)
        assert read[0] == (0, 0)
        assert read.index((1, 2)) < read.index((1, 1))


def test_a_hint_that_came_true_is_there_and_one_that_did_not_is_given_up(
    layout: ExpertLayout,
) -> None:
    tier = FakeTier()
    with opened(layout, 6, tier) as cache:
        cache.hint("me", 1, [Guess(2, 0.9)])
        tier.experts_read(1)
        tier.gate = threading.Semaphore(0)
        cache.hint("me", 2, [Guess(0, 0.9), Guess(1, 0.8)])
        want = cache.want(1, [2], LS, "me")
        assert compute(cache, want) == [2]
        assert cache.traffic.used_hint_bytes == tier.expert_bytes
        other = cache.want(2, [3], LS, "me")
        tier.gate.release(1000)
        assert compute(cache, other) == [3]
        assert not cache.holds(2, 0)
        assert not cache.holds(2, 1)


def test_a_hint_evicts_nothing_that_is_wanted_or_hinted(layout: ExpertLayout) -> None:
    tier = FakeTier()
    with opened(layout, 2, tier) as cache:
        want = cache.want(0, [0, 1], LS)
        tier.experts_read(2)
        cache.hint("me", 1, [Guess(2, 1.0)])
        assert len(tier.read) == 2 * PARTS
        assert sorted(compute(cache, want)) == [0, 1]
        assert tier.experts_read(3)[2] == (1, 2), "now there is a slot"


def test_what_cannot_be_read_is_an_error_for_those_who_want_it_alone(
    layout: ExpertLayout,
) -> None:
    tier = FakeTier()
    tier.broken = {(0, 1)}
    with opened(layout, 3, tier) as cache:
        cache.hint("me", 0, [Guess(1, 1.0)])
        bad, good = cache.want(0, [0, 1], LS), cache.want(2, [1], LS)
        with pytest.raises(ChannelError, match="expert 1 of layer 0 is broken"):
            compute(cache, bad)
        cache.drop(bad)
        assert compute(cache, good) == [1]


def test_a_tier_that_gives_nothing_for_the_deadline_is_named(layout: ExpertLayout) -> None:
    tier = FakeTier()
    tier.gate = threading.Semaphore(0)
    with opened(layout, 3, tier, deadline_s=0.2) as cache:
        want, start_s = cache.want(1, [2, 3], LS), monotonic_s()
        with pytest.raises(ChannelError, match=r"experts \[2, 3\] of layer 1 .* from the disk"):
            compute(cache, want)
        assert monotonic_s() - start_s < 2.0
        cache.drop(want)
        tier.gate.release(1000)


def test_a_wait_ends_when_it_is_woken(layout: ExpertLayout) -> None:
    tier = FakeTier()
    tier.gate = threading.Semaphore(0)
    with opened(layout, 3, tier) as cache:
        want = cache.want(1, [2], LS)
        waker = threading.Timer(0.05, cache.wake)
        waker.start()
        assert cache.wait(DEADLINE_S)
        assert not want.ready


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["want", "compute", "drop", "hint", "forget"]),
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True),
        st.sampled_from([LS, BE]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(slots=st.integers(2, 12), kind=st.sampled_from(["lru", "lfu", "walk"]), events=EVENTS)
def test_any_hints_wants_and_drops_end_with_what_was_wanted(
    layout: ExpertLayout,
    slots: int,
    kind: Kind,
    events: Sequence[tuple[str, int, list[int], Priority]],
) -> None:
    with opened(layout, slots, FakeTier(), kind=kind) as cache:
        wants: list[Want] = []
        for number, (what, layer, experts, priority) in enumerate(events):
            owner = number % 3
            if what == "want":
                wants.append(cache.want(layer, sorted(experts), priority, owner))
            elif what == "hint":
                cache.hint(owner, layer, [Guess(e, 1 / (1 + e)) for e in experts])
            elif what == "forget":
                cache.forget_hints(owner)
            elif wants and what == "drop":
                cache.drop(wants.pop(layer % len(wants)))
            elif wants:
                want = wants[layer % len(wants)]
                taken = cache.take(want, dict.fromkeys(range(EXPERTS), 1), 1)
                cache.done(want, taken)
            cache.check()
        while any(want.left for want in wants):  # whoever can go on does, as in the executor
            assert cache.wait(DEADLINE_S)
            for want in wants:
                taken = cache.take(want, dict.fromkeys(range(EXPERTS), 1), 2)
                cache.done(want, taken)
