"""Routers under random use, their block indexes, and the thresholds of Eq. 1 to 3."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.requests import chain_hashes
from contracts.routing_messages import Calibration, Prompt
from planner.costs.model_shape import ModelShape, layer_mean_work
from planner.routing.open_requests import flops_work, token_work, work_of
from planner.routing.prefix_index import PendingBlocks, PrefixIndex
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig, threshold, usable_tokens
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape, small_shapes
from tests.support.paper_routing import RouteDecision, route_unsaturated, transfer_threshold_flops
from tests.support.routing import (
    BLOCK,
    LoggingWorker,
    calibrations,
    prompt_of,
    quadratic_work,
    token_lists,
)

WORKERS, ROUTERS = 3, 2
SATURATION = SaturationConfig(fallback_prompts=(12,))
workers = st.integers(0, WORKERS - 1)
routers = st.integers(0, ROUTERS - 1)
stateful = settings(max_examples=120, stateful_step_count=40, deadline=None)


def new_router(number: int) -> Router:
    config = RouterConfig(workers=WORKERS, saturation=SATURATION, number=number, block_tokens=BLOCK)
    return Router(config, quadratic_work)


class Cluster(RuleBasedStateMachine):
    """Routers place prompts; prompts and reports arrive late, in any order between workers.

    Some reports arrive twice. Workers cache, evict, cancel, die and return.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workers = [LoggingWorker(n, quadratic_work, cache_blocks=5) for n in range(WORKERS)]
        self.routers = [new_router(number) for number in range(ROUTERS)]
        self.received = [[0] * WORKERS for _ in range(ROUTERS)]
        self.travelling: list[tuple[int, Prompt]] = []  # sent, not yet accepted
        self.placed = 0

    @rule(number=routers, tokens=token_lists)
    def place(self, number: int, tokens: list[int]) -> None:
        prompt = prompt_of(tokens, self.placed, number)
        expected = self._paper_choice(number, prompt)
        assert route_unsaturated(self.routers[number], prompt) == expected
        if expected is not None:
            self.placed += 1
            self.travelling.append((expected.worker, prompt))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data(), arrives=st.booleans())
    def a_prompt_arrives_or_is_lost(self, data: st.DataObject, arrives: bool) -> None:
        index = data.draw(st.integers(0, len(self.travelling) - 1))
        worker, prompt = self.travelling.pop(index)
        if arrives:
            self.workers[worker].accept(prompt)
        else:
            self.routers[prompt.key.router].withdraw(prompt.key)

    @rule(number=workers, act=st.sampled_from(["start", "finish", "cancel"]))
    def a_worker_goes_on(self, number: int, act: str) -> None:
        if self.workers[number].queue:
            getattr(self.workers[number], act)()

    @rule(number=workers, calibration=calibrations)
    def a_worker_calibrates(self, number: int, calibration: Calibration) -> None:
        self.workers[number].append_report(calibration=calibration)

    @rule(number=routers, worker=workers, again=st.integers(0, 3))
    def a_report_arrives_and_old_ones_again(self, number: int, worker: int, again: int) -> None:
        received, log = self.received[number][worker], self.workers[worker].log
        for report in log[max(0, received - again) : received + 1]:
            self.routers[number].apply(report)
        self.received[number][worker] = min(received + 1, len(log))

    @rule(number=routers, worker=workers)
    def a_router_takes_a_snapshot(self, number: int, worker: int) -> None:
        state, log = self.workers[worker].state, self.workers[worker].log
        if state.number >= 0:
            self.routers[number].restore(state.snapshot(worker))
            for report in log[self.received[number][worker] :]:
                for key in report.ended:  # its answer came, though the report did not
                    self.routers[number].withdraw(key)
            self.received[number][worker] = len(log)

    @rule(worker=workers)
    def a_worker_dies_and_another_takes_its_place(self, worker: int) -> None:
        dead = self.workers[worker]
        on_their_way = [p for target, p in self.travelling if target == worker]
        self.travelling = [entry for entry in self.travelling if entry[0] != worker]
        for number, router in enumerate(self.routers):
            accepted_prompts = [
                p for report in dead.log[: self.received[number][worker]] for p in report.accepted
            ]
            ended = {k for r in dead.log[: self.received[number][worker]] for k in r.ended}
            lost = set(router.lose(worker))
            open_ones = {p.key for p in accepted_prompts if p.key.router == number} - ended
            assert open_ones | {p.key for p in on_their_way if p.key.router == number} <= lost
            assert router.load(worker) == 0
            self.received[number][worker] = 0
        self.workers[worker] = LoggingWorker(worker, quadratic_work, 5, dead.epoch + 1)
        self.workers[worker].append_report()

    @invariant()
    def loads_are_what_is_open(self) -> None:
        for number, router in enumerate(self.routers):
            for worker in range(WORKERS):
                opened = router.snapshot(worker).requests
                accepted = sum(
                    quadratic_work(r.done_tokens, r.prompt.prompt_tokens) for r in opened
                )
                own = router.load(worker) - accepted
                waiting = self._unaccepted(number, worker)
                assert bool(own) == bool(waiting)
                assert own <= sum(quadratic_work(0, p.prompt_tokens) for p in waiting)

    def teardown(self) -> None:
        """Deliver everything and end all requests: routers agree and nothing is left."""
        for number, prompt in self.travelling:
            self.workers[number].accept(prompt)
        self._receive_all()
        for number, worker in enumerate(self.workers):
            expected = worker.state.snapshot(number)
            assert set(expected.committed) == set(worker.cache)
            assert all(router.snapshot(number) == expected for router in self.routers)
            while worker.queue:
                worker.finish()
        self._receive_all()
        for router in self.routers:
            assert [router.load(worker) for worker in range(WORKERS)] == [0] * WORKERS
            committed = {d for w in range(WORKERS) for d in router.snapshot(w).committed}
            assert router.blocks == len(committed)

    def _receive_all(self) -> None:
        for number, router in enumerate(self.routers):
            for worker in self.workers:
                for report in worker.log[self.received[number][worker.number] :]:
                    router.apply(report)
                self.received[number][worker.number] = len(worker.log)

    def _unaccepted(self, number: int, worker: int) -> list[Prompt]:
        """Return this router's prompts for the worker without a received acceptance."""
        unreceived = self.workers[worker].log[self.received[number][worker] :]
        arrived = [prompt for report in unreceived for prompt in report.accepted]
        sent = [prompt for target, prompt in self.travelling if target == worker]
        return [prompt for prompt in [*arrived, *sent] if prompt.key.router == number]

    def _queued(self, number: int, worker: int) -> int:
        """Return the work in no running batch, by the reports this router received."""
        opened = self.routers[number].snapshot(worker).requests
        running = [r for r in opened if r.until_tokens > r.done_tokens]
        under_way = sum(quadratic_work(r.done_tokens, r.until_tokens) for r in running)
        return self.routers[number].load(worker) - under_way

    def _paper_choice(self, number: int, prompt: Prompt) -> RouteDecision | None:
        """Return the choice of the cascade, computed over sets."""
        router, options = self.routers[number], []
        for worker in range(WORKERS):
            snapshot = router.snapshot(worker)
            known = set(snapshot.committed).union(*(r.prompt.hashes for r in snapshot.requests))
            known = known.union(*(p.hashes for p in self._unaccepted(number, worker)))
            tau = threshold(SATURATION, quadratic_work, snapshot.calibration)
            present = self.workers[worker].epoch == 0 or self.received[number][worker] > 0
            if present and self._queued(number, worker) < tau:
                blocks = _contiguous(prompt.hashes, known)
                options.append((-blocks, router.load(worker), worker))
        if not options:
            return None
        blocks, _, worker = min(options)
        cached = usable_tokens(prompt, -blocks, BLOCK)
        return RouteDecision(worker, cached, quadratic_work(cached, prompt.prompt_tokens))


TestCluster = Cluster.TestCase
TestCluster.settings = stateful


def _contiguous(hashes: Sequence[bytes], known: set[bytes]) -> int:
    return next((i for i, digest in enumerate(hashes) if digest not in known), len(hashes))


NUMBERS = 8
digests = st.integers(0, NUMBERS - 1).map(lambda number: bytes([number]))
changes = st.lists(st.tuples(workers, st.sets(digests), st.booleans()), max_size=20)
chains = st.permutations([bytes([number]) for number in range(NUMBERS)])


def built(steps: list[tuple[int, set[bytes], bool]]) -> tuple[PrefixIndex, list[set[bytes]]]:
    index, sets = PrefixIndex(WORKERS), [set[bytes]() for _ in range(WORKERS)]
    for worker, some, held in steps:
        (index.add if held else index.discard)(worker, sorted(some))
        (sets[worker].update if held else sets[worker].difference_update)(some)
    return index, sets


@given(chains, st.lists(st.integers(0, NUMBERS), min_size=WORKERS, max_size=WORKERS))
def test_match_counts_leading_blocks(chain: list[bytes], held: list[int]) -> None:
    index = PrefixIndex(WORKERS)
    for worker, blocks in enumerate(held):
        index.add(worker, chain[:blocks])
    assert index.matches(chain) == held
    assert [index.match(worker, chain) for worker in range(WORKERS)] == held


@given(changes, chains)
def test_match_of_broken_chain_is_an_end_of_a_held_run(
    steps: list[tuple[int, set[bytes], bool]], chain: list[bytes]
) -> None:
    index, sets = built(steps)
    for matches in (index.matches(chain), [index.match(n, chain) for n in range(WORKERS)]):
        for blocks, held in zip(matches, sets, strict=True):
            assert blocks == 0 or chain[blocks - 1] in held
            assert blocks == len(chain) or chain[blocks] not in held


@given(changes, workers)
def test_index_equals_worker_sets(steps: list[tuple[int, set[bytes], bool]], cleared: int) -> None:
    index, sets = built(steps)
    for _ in range(2):
        assert len(index) == len(set().union(*sets))
        for digest in map(bytes, ([number] for number in range(NUMBERS))):
            assert index.matches([digest]) == [int(digest in held) for held in sets]
        index.clear(cleared)
        sets[cleared].clear()


texts = st.lists(st.integers(0, 1), max_size=9)


class Chains(RuleBasedStateMachine):
    """Blocks of one token, so that short prompts diverge and end at every block."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = PendingBlocks()
        self.open: list[tuple[int, list[bytes]]] = []

    @rule(worker=workers, tokens=texts)
    def a_chain_comes(self, worker: int, tokens: list[int]) -> None:
        hashes = chain_hashes(tokens, 1)
        self.promises.add(worker, hashes)
        self.open.append((worker, hashes))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_chain_goes(self, data: st.DataObject) -> None:
        worker, hashes = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.promises.remove(worker, [bytes(bytearray(digest)) for digest in hashes])

    @rule(worker=workers)
    def a_worker_goes(self, worker: int) -> None:
        self.promises.clear(worker)
        self.open = [(owner, hashes) for owner, hashes in self.open if owner != worker]

    @rule(tokens=texts)
    def matches_are_those_of_a_set_per_worker(self, tokens: list[int]) -> None:
        hashes = chain_hashes(tokens, 1)
        expected = [sum(digest in self._blocks(n) for digest in hashes) for n in range(WORKERS)]
        found = self.promises.matches(hashes)
        assert [found.get(worker, 0) for worker in range(WORKERS)] == expected
        assert [self.promises.match(worker, hashes) for worker in range(WORKERS)] == expected

    @invariant()
    def blocks_are_counted_once(self) -> None:
        assert len(self.promises) == len(set().union(*map(self._blocks, range(WORKERS))))

    def _blocks(self, worker: int) -> set[bytes]:
        return {digest for owner, hashes in self.open if owner == worker for digest in hashes}


def test_unchained_hashes_are_rejected() -> None:
    promises = PendingBlocks()
    for digest in (b"a", b"b"):
        promises.add(0, [digest])
    with pytest.raises(ValueError, match="block 1 has the hash of block 0 of another prompt"):
        promises.add(0, [b"b", b"a"])


TestChains = Chains.TestCase
TestChains.settings = stateful


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
    found = threshold(SaturationConfig(fallback_prompts=()), work, calibration)
    assert found == pytest.approx(needed, rel=1e-9, abs=1)


@some
@given(calibrations, st.integers(1, 1 << 60))
def test_fallback_threshold_is_eq_3_without_stretch_and_a_pinned_one_is_kept(
    calibration: Calibration, pinned: int
) -> None:
    config = SaturationConfig(fallback_prompts=calibration.reference_prompts)
    fallback = threshold(config, token_work, None)
    assert fallback <= threshold(config, token_work, calibration)
    assert fallback == pytest.approx(1.1 * sum(calibration.reference_prompts), abs=1)
    config = SaturationConfig(fallback_prompts=(1,), pinned=pinned)
    assert threshold(config, token_work, calibration) == pinned


def test_calibration_rejects_impossible_layer_times() -> None:
    for first, slowest in ((0.0, 1.0), (2.0, 1.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="layer"):
            Calibration(first_layer_s=first, slowest_layer_s=slowest, reference_prompts=(1,))


@some
@given(small_shapes, windows, st.integers(0, 90), st.integers(1, 90))
def test_work_is_what_counting_every_token_and_pair_gives(
    model: ModelShape, window: int | None, cached: int, fresh: int
) -> None:
    model = msgspec.structs.replace(model, windows=(window,) * model.num_layers)
    per_token = model.projection_elements + model.hidden_size * model.num_experts
    per_token += model.top_k * model.expert_elements + model.shared_elements
    seen = [min(token + 1, window or token + 1) for token in range(cached, cached + fresh)]
    pair_flops = 4 * model.num_heads * model.head_dim
    expected = model.num_layers * (2 * fresh * per_token + pair_flops * sum(seen))
    assert flops_work(model)(cached, cached + fresh) == expected


@some
@given(st.sampled_from([QWEN3_235B, DEEPSEEK_V2]), st.integers(0, 3000), st.integers(1, 3000))
def test_work_equals_attention_of_planner(
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


def test_work_without_shape_is_in_tokens() -> None:
    assert work_of(None)(16, 40) == 24
    assert work_of(shape(QWEN3_235B))(16, 40) > 24e9
    assert shape(DEEPSEEK_V2).dense_elements == 3 * 5120 * 12288
