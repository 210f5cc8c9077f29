"""The expert cache serves requests in any order and keeps its slots consistent."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.requests import Priority
from models.experts.cache_requests import DEMAND, USED_HINT, ExpertRequest, PredictedExpert
from models.experts.expert_cache import HINT_PARTS, LS_LIVE_S, ExpertCache
from models.experts.expert_eviction import EvictionKind
from models.experts.expert_format import CompletedRead, ComputeSlots, SlotMemory
from models.experts.expert_layout import ExpertLayout
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint
from tests.support.tiny_models import Checkpoints

LAYERS, EXPERTS, PARTS, ROOM, DEADLINE_S = 3, 4, 2, 8, 20.0
LS, BE = Priority


class FakeTier:
    """Fills `allowed` parts of experts with their numbers, the most urgent first.

    log: (layer, expert, part) in the order of the reads.
    """

    parts, expert_bytes = PARTS, 100

    def __init__(self, allowed: int = 1_000_000) -> None:
        self.allowed = allowed
        self.log: list[tuple[int, int, int]] = []
        self.broken: set[tuple[int, int]] = set()
        self.closed = self.woken = False
        self._requests: dict[int, tuple[int, int, int, int]] = {}  # ticket -> urgency, what
        self._skipped: set[int] = set()
        self._ended: dict[int, tuple[int, int, int]] = {}
        self._tickets = 0

    def __str__(self) -> str:
        return "the disk"

    @property
    def room(self) -> int:
        return ROOM - len(self._requests) - len(self._ended)

    def enqueue(self, layer: int, expert: int, part: int, urgency: int) -> int:
        assert self.room > 0
        self._tickets += 1
        self._requests[self._tickets] = urgency, layer, expert, part
        return self._tickets

    def submit(self) -> None:
        """Do nothing: reads start at once."""

    def expedite(self, ticket: int, urgency: int) -> None:
        if ticket in self._requests:
            self._requests[ticket] = urgency, *self._requests[ticket][1:]

    def cancel(self, ticket: int) -> None:
        self._skipped.add(ticket)

    def poll_completed(self) -> list[CompletedRead]:
        found = []
        while self._requests and self.allowed:
            ticket = min(self._requests, key=lambda each: (self._requests[each][0], each))
            _, layer, expert, part = self._requests.pop(ticket)
            self._ended[ticket] = layer, expert, part
            if ticket in self._skipped:
                found.append(CompletedRead(ticket, 0.0))
                continue
            self.allowed -= 1
            broken = (layer, expert) in self.broken
            found.append(CompletedRead(ticket, 0.001, "it is broken" if broken else ""))
            if not broken:
                self.log.append((layer, expert, part))
        return found

    def copy(self, ticket: int, into: SlotMemory) -> None:
        layer, expert, part = self._ended[ticket]
        for tensor in into:
            half = len(tensor) // PARTS
            tensor[part * half : (part + 1) * half] = bytes([number_of(layer, expert)]) * half

    def free(self, ticket: int) -> None:
        del self._ended[ticket]

    def wait(self, timeout_s: float) -> None:
        if not self.woken:
            time.sleep(timeout_s if not self.allowed else 0.0)
        self.woken = False

    def fileno(self) -> int:
        return -1

    def wake(self) -> None:
        self.woken = True

    def close(self) -> None:
        self.closed = True

    @property
    def experts(self) -> list[tuple[int, int]]:
        """Return the experts in the order of their last parts."""
        return [(layer, expert) for layer, expert, part in self.log if part == PARTS - 1]


def number_of(layer: int, expert: int) -> int:
    return 1 + layer * EXPERTS + expert


@pytest.fixture(scope="module")
def layout(tiny_checkpoint: Checkpoints) -> ExpertLayout:
    model: ModelSpec = check_checkpoint(tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS))
    return ExpertLayout(model, torch.float32, torch.device("cpu"))


def opened(
    layout: ExpertLayout, slots: int, tier: FakeTier, *, kind: EvictionKind = "lru", **options: Any
) -> ExpertCache:
    options = {"deadline_s": DEADLINE_S, **options}
    return ExpertCache(tier, ComputeSlots(layout, slots), kind, **options)


def compute(cache: ExpertCache, request: ExpertRequest, most: int = 1) -> list[int]:
    """Complete a request; return its experts in the order of compute. Checks their contents."""
    order: list[int] = []
    while request.left:
        acquired = cache.acquire(request, PAIRS, most)
        for expert, slot in acquired:
            memory = cache._memory[slot]
            assert all(set(tensor) == {number_of(request.layer, expert)} for tensor in memory)
            order.append(expert)
        if acquired:
            cache.complete(request, acquired)
        else:
            cache.wait(0.05)
    return order


PAIRS = dict.fromkeys(range(EXPERTS), 1)


def test_cached_expert_is_a_hit_and_not_read_again(layout: ExpertLayout) -> None:
    tier = FakeTier()
    cache = opened(layout, 4, tier)
    for _ in range(3):
        compute(cache, cache.request(1, [0, 3], LS))
    assert tier.experts == [(1, 0), (1, 3)]
    traffic = cache.traffic
    assert (traffic.hits[1], traffic.requested[1]) == (4, 6)
    assert traffic.read_bytes[DEMAND] == 2 * tier.expert_bytes
    assert traffic.hit_fraction(1) == pytest.approx(4 / 6)


def test_acquired_experts_are_adjacent_in_request(layout: ExpertLayout) -> None:
    tier = FakeTier()
    cache = opened(layout, 4, tier)
    compute(cache, cache.request(0, [1, 3], LS))
    tier.allowed = 0
    request = cache.request(0, range(EXPERTS), LS)
    first = cache.acquire(request, PAIRS, 9)
    assert [expert for expert, _ in first] == [1]
    cache.complete(request, first)
    tier.allowed = 1000
    cache.wait(0.0)
    runs = []
    while request.left:
        runs.append(cache.acquire(request, PAIRS, 9))
        cache.complete(request, runs[-1])
    assert [[expert for expert, _ in run] for run in runs] == [[0], [2, 3]]


def test_ls_request_is_read_before_be(layout: ExpertLayout) -> None:
    tier = FakeTier(allowed=0)
    cache = opened(layout, 2, tier)
    be = cache.request(0, [0, 1], BE)
    ls = cache.request(1, [2, 3], LS)
    tier.allowed = 1000
    assert sorted(compute(cache, ls)) == [2, 3]
    assert sorted(compute(cache, be)) == [0, 1]
    assert tier.experts[:2] == [(1, 2), (1, 3)], "queued reads of BE were skipped"
    tier = FakeTier(allowed=0)
    cache = opened(layout, 6, tier)
    cache.hint("me", 1, [PredictedExpert(2, 0.9)])
    cache.request(0, [1], BE)
    request = cache.request(1, [2], LS, "me")
    tier.allowed = PARTS
    assert compute(cache, request) == [2], "so is a hint that is requested"


@pytest.mark.parametrize("kind", ["lru", "walk"])
@pytest.mark.parametrize("quiet_s", [0.0, 2 * LS_LIVE_S])
def test_be_keeps_ls_experts_while_ls_is_live(
    layout: ExpertLayout, kind: EvictionKind, quiet_s: float
) -> None:
    tier, now = FakeTier(), [5.0]
    cache = opened(layout, 8, tier, kind=kind, clock=lambda: now[0])
    for layer in range(2):
        compute(cache, cache.request(layer, [0, 1], LS))
    now[0] += quiet_s
    for _ in range(2):
        for layer in range(LAYERS):
            compute(cache, cache.request(layer, list(range(EXPERTS)), BE))
            cache.hint(
                "be", (layer + 1) % LAYERS, [PredictedExpert(2, 0.99), PredictedExpert(3, 0.99)], BE
            )
    there = [cache.holds(layer, expert) for layer in range(2) for expert in (0, 1)]
    assert all(there) == (not quiet_s), "without live LS, BE takes the slots"
    cache.check()


def test_hints_are_read_by_confidence_after_requests(layout: ExpertLayout) -> None:
    tier = FakeTier(allowed=0)
    cache = opened(layout, 6, tier)
    cache.hint("other", 2, [PredictedExpert(expert, 0.9) for expert in range(EXPERTS)])
    assert tier.room == ROOM - min(PARTS, HINT_PARTS), "one hint is read at a time"
    cache.forget_hints("other")
    cache.request(0, [0], LS)
    cache.hint("me", 1, [PredictedExpert(1, 0.2), PredictedExpert(2, 0.9), PredictedExpert(3, 0.5)])
    tier.allowed = 1000
    for _ in range(8):
        cache.wait(0.0)
    assert tier.experts == [(0, 0), (1, 2), (1, 3), (1, 1)]


def test_confirmed_hint_is_in_slot_and_wrong_hint_is_cancelled(layout: ExpertLayout) -> None:
    tier = FakeTier()
    cache = opened(layout, 6, tier)
    cache.hint("me", 1, [PredictedExpert(2, 0.9)])
    cache.wait(0.0)
    cache.wait(0.0)
    tier.allowed = 0
    cache.hint("me", 2, [PredictedExpert(0, 0.9), PredictedExpert(1, 0.8)])
    assert compute(cache, cache.request(1, [2], LS, "me")) == [2]
    assert cache.traffic.read_bytes[USED_HINT] == tier.expert_bytes
    other = cache.request(2, [3], LS, "me")
    tier.allowed = 1000
    assert compute(cache, other) == [3]
    assert not cache.holds(2, 0)
    assert not cache.holds(2, 1)
    cache.check()


def test_hint_never_evicts_requested_or_hinted_experts(layout: ExpertLayout) -> None:
    tier = FakeTier()
    cache = opened(layout, 2, tier)
    request = cache.request(0, [0, 1], LS)
    cache.wait(0.0)
    cache.hint("me", 1, [PredictedExpert(2, 1.0)])
    cache.wait(0.0)
    assert tier.experts == [(0, 0), (0, 1)]
    assert sorted(compute(cache, request)) == [0, 1]
    assert not cache.wait(0.0)
    assert tier.experts[2:] == [(1, 2)], "a slot is free now"


def test_unprofitable_hint_is_not_read(layout: ExpertLayout) -> None:
    cache = opened(layout, 6, FakeTier(), is_worth_reading=lambda p, hidden_s, wait_s: p > 0.5)
    for owner in ("one", "two"):  # the first one measures times
        cache.hint(owner, 1, [PredictedExpert(0, 0.9)])
        cache.wait(0.0)
        compute(cache, cache.request(1, [0], LS, owner))
    cache.hint("three", 2, [PredictedExpert(1, 0.6), PredictedExpert(2, 0.4)])
    for _ in range(4):
        cache.wait(0.0)
    assert cache.holds(2, 1)
    assert not cache.holds(2, 2)


def test_unreadable_expert_fails_only_its_requests(layout: ExpertLayout) -> None:
    tier = FakeTier()
    tier.broken = {(0, 1)}
    cache = opened(layout, 3, tier)
    cache.hint("me", 0, [PredictedExpert(1, 1.0)])
    bad, good = cache.request(0, [0, 1], LS), cache.request(2, [1], LS)
    with pytest.raises(ChannelError, match="expert 1 of layer 0: it is broken"):
        compute(cache, bad)
    cache.cancel(bad)
    assert compute(cache, good) == [1]
    tier.broken.clear()
    assert compute(cache, cache.request(0, [1], LS)) == [1], "the read is tried again"
    cache.check()


def test_stalled_tier_is_named_after_timeout(layout: ExpertLayout) -> None:
    tier = FakeTier(allowed=0)
    cache = opened(layout, 3, tier, deadline_s=0.1)
    request, start_s = cache.request(1, [2, 3], LS), monotonic_s()
    with pytest.raises(ChannelError, match=r"experts \[2, 3\] of layer 1 .* from the disk"):
        compute(cache, request)
    assert monotonic_s() - start_s < 10.0
    cache.cancel(request)
    tier.allowed = 1000
    cache.wait(0.0)
    cache.check()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["want", "compute", "drop", "hint", "forget", "read"]),
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True),
        st.sampled_from([LS, BE]),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(slots=st.integers(2, 12), kind=st.sampled_from(["lru", "walk"]), events=EVENTS)
def test_any_events_leave_requests_computable(
    layout: ExpertLayout,
    slots: int,
    kind: EvictionKind,
    events: Sequence[tuple[str, int, list[int], Priority]],
) -> None:
    tier = FakeTier(allowed=0)
    cache = opened(layout, slots, tier, kind=kind)
    requests: list[ExpertRequest] = []
    for number, (what, layer, experts, priority) in enumerate(events):
        owner = number % 3
        if what == "want":
            requests.append(cache.request(layer, sorted(experts), priority, owner))
        elif what == "hint":
            cache.hint(owner, layer, [PredictedExpert(e, 1 / (1 + e)) for e in experts])
        elif what == "forget":
            cache.forget_hints(owner)
        elif what == "read":
            tier.allowed += len(experts)
            cache.wait(0.0)
        elif requests and what == "drop":
            cache.cancel(requests.pop(layer % len(requests)))
        elif requests:
            request = requests[layer % len(requests)]
            cache.complete(request, cache.acquire(request, PAIRS, 1))
        cache.check()
    tier.allowed = 1_000_000
    for _ in range(1000):  # whoever can go on does, as in the executor
        if not any(request.left for request in requests):
            break
        cache.wait(0.0)
        for request in requests:
            cache.complete(request, cache.acquire(request, PAIRS, 2))
        cache.check()
    assert not any(request.left for request in requests)
