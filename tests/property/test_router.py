"""Routers under random use: exact loads, the paper's choice, agreement of all routers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.routing_messages import Calibration, Prompt
from planner.routing.router import RouteDecision, Router, RouterConfig
from planner.routing.saturation import SaturationConfig, threshold
from planner.routing.worker_state import usable_tokens
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
        assert self.routers[number].route(prompt) == expected
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
    def a_report_arrives_and_some_old_ones_again(
        self, number: int, worker: int, again: int
    ) -> None:
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
TestCluster.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@settings(deadline=None, max_examples=100)
@given(st.lists(token_lists, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_routers_agree_whatever_the_order_between_workers(
    texts: list[list[int]], random: Random
) -> None:
    logging = [LoggingWorker(n, quadratic_work, cache_blocks=4) for n in range(WORKERS)]
    for index, tokens in enumerate(texts):
        worker = logging[index % WORKERS]
        worker.accept(prompt_of(tokens, index))
        if index % 4 == 3:
            worker.start()
            worker.finish()
    reports = [report for worker in logging for report in worker.log]
    pair = [new_router(0), new_router(1)]
    for router in pair:
        keys = [(random.random(), report.worker) for report in reports]
        queues = {n: list(logging[n].log) for n in range(WORKERS)}
        for _, number in sorted(keys):
            router.apply(queues[number].pop(0))
    prompt = prompt_of(texts[0], 999)
    assert [pair[0].snapshot(n) for n in range(WORKERS)] == [
        pair[1].snapshot(n) for n in range(WORKERS)
    ]
    assert pair[0].route(prompt) == pair[1].route(prompt)


def _contiguous(hashes: Sequence[bytes], known: set[bytes]) -> int:
    return next((i for i, digest in enumerate(hashes) if digest not in known), len(hashes))
