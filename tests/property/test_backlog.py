"""The backlog of held requests, and the lanes of its worker queues."""

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from contracts.requests import Priority
from contracts.routing_messages import Prompt, RequestKey
from planner.routing.backlog import Backlog, HeldRequest, Lane, WorkerQueue
from planner.routing.router import Router, RouterConfig
from planner.routing.worker_state import SaturationConfig
from tests.support.routing import BLOCK, LoggingWorker, prompt_of, quadratic_work, token_lists

WORKERS = 3
UNLIMITED = 1000

few = settings(deadline=None, max_examples=100)
taus = st.integers(1, 400)


class Front:
    """A backlog, its router, and workers with immediate reports."""

    def __init__(self, tau: int) -> None:
        self.tau = tau
        saturation = SaturationConfig(fallback_prompts=(1,), pinned=tau)
        config = RouterConfig(workers=WORKERS, saturation=saturation, block_tokens=BLOCK)
        self.router = Router(config, quadratic_work)
        self.backlog = Backlog(self.router, quadratic_work)
        self.workers = [LoggingWorker(n, quadratic_work, UNLIMITED) for n in range(WORKERS)]
        self.sent: list[Prompt] = []

    def put(self, prompts: Iterable[Prompt], lane: Lane = Lane.FIRST) -> None:
        for prompt in prompts:
            self.backlog.put(HeldRequest(prompt, lane))

    def send(self) -> None:
        for prompt, worker in self.backlog.take():
            self.sent.append(prompt)
            self.router.apply(self.workers[worker].accept(prompt))

    def step(self, worker: int) -> None:
        if self.workers[worker].queue:
            self.begin(worker)
            self.router.apply(self.workers[worker].finish())
        self.send()

    def begin(self, worker: int) -> None:
        self.router.apply(self.workers[worker].start())
        self.send()

    def drain(self) -> None:
        while any(worker.queue for worker in self.workers):
            for number in range(WORKERS):
                self.step(number)


def prompts_of(texts: list[list[int]]) -> list[Prompt]:
    return [prompt_of(tokens, number) for number, tokens in enumerate(texts)]


@few
@given(
    st.lists(st.tuples(token_lists, st.sampled_from(Lane)), max_size=40),
    taus,
    st.lists(st.integers(0, WORKERS - 1), max_size=30),
)
def test_every_request_is_sent_once_and_loads_end_at_zero(
    texts: list[tuple[list[int], Lane]], tau: int, steps: list[int]
) -> None:
    front, prompts = Front(tau), prompts_of([tokens for tokens, _ in texts])
    for index, (prompt, (_, lane)) in enumerate(zip(prompts, texts, strict=True)):
        front.put([prompt], lane)
        if index < len(steps):
            front.send()
            front.step(steps[index])
    front.send()
    front.drain()
    assert sorted(p.key for p in front.sent) == [p.key for p in prompts]
    assert len(front.backlog) == 0
    assert [front.router.load(n) for n in range(WORKERS)] == [0] * WORKERS


@few
@given(st.lists(token_lists, min_size=1, max_size=40), taus, st.integers(0, 30))
def test_queues_stay_a_request_within_threshold(
    texts: list[list[int]], tau: int, steps: int
) -> None:
    front, prompts = Front(tau), prompts_of(texts)
    largest = max(quadratic_work(0, prompt.prompt_tokens) for prompt in prompts)
    front.put(prompts)
    front.send()
    for step in range(steps):
        if step % 3 and front.workers[step % WORKERS].queue:
            front.begin(step % WORKERS)  # the next batch's requests come while this one runs
        queued = [front.router.queued(n) for n in range(WORKERS)]
        assert max(queued) < tau + largest
        assert len(front.backlog) == 0 or min(queued) >= tau
        front.step(step % WORKERS)


@few
@given(st.lists(token_lists, min_size=1, max_size=30), st.data())
def test_cancelled_requests_are_never_dispatched(
    texts: list[list[int]], data: st.DataObject
) -> None:
    front, prompts = Front(tau=1), prompts_of(texts)
    front.put(prompts)
    gone = data.draw(st.sets(st.sampled_from([prompt.key for prompt in prompts])))
    for key in gone:
        front.backlog.remove(key)
    front.send()
    front.drain()
    assert {prompt.key for prompt in front.sent} == {prompt.key for prompt in prompts} - gone


@few
@given(st.lists(token_lists, min_size=4, max_size=30), st.integers(0, WORKERS - 1))
def test_requests_held_for_a_lost_worker_move(texts: list[list[int]], lost: int) -> None:
    front, prompts = Front(tau=1), prompts_of(texts)
    front.put(prompts)
    front.send()
    again = front.router.lose(lost)
    front.backlog.lose(lost)
    survivors = [prompt for prompt in front.sent if prompt.key not in again]
    by_key = {prompt.key: prompt for prompt in prompts}
    front.workers[lost] = LoggingWorker(lost, quadratic_work, UNLIMITED, epoch=1)
    front.sent = survivors
    front.put(by_key[key] for key in again)
    front.drain()
    assert sorted(p.key for p in front.sent) == [p.key for p in prompts]


def test_requests_wait_until_a_worker_is_present() -> None:
    front = Front(tau=100)
    for worker in range(WORKERS):
        front.router.lose(worker)
        front.backlog.lose(worker)
    front.put([prompt_of([1] * 8, 0)])
    assert front.backlog.take() == []
    front.router.apply(LoggingWorker(1, quadratic_work, UNLIMITED, epoch=1).append_report())
    front.backlog.settle()
    assert [release.worker for release in front.backlog.take()] == [1]


def test_siblings_share_a_home_but_not_that_of_a_cancelled_request() -> None:
    families = [[0, 1] * BLOCK, [1] * 2 * BLOCK, [0] * 2 * BLOCK]
    prompts = [prompt_of([*families[n % 3], 2, n], n) for n in range(12)]
    for tau in (400, 1_000_000):
        front = Front(tau)
        front.put(prompts)
        front.send()
        homes = [{p.key.number % 3 for p in worker.queue} for worker in front.workers]
        assert homes == [{0}, {1}, {2}]
    front = Front(tau=10_000)
    first, other, sibling = (prompt_of([n] * 8, number) for number, n in enumerate((1, 2, 1)))
    front.put([first])
    front.backlog.remove(first.key)
    front.put((other, sibling))
    front.send()
    assert [[p.key.number for p in worker.queue] for worker in front.workers] == [[1], [2], []]


def test_idle_worker_steals_from_the_end_of_the_longest_queue() -> None:
    front = Front(tau=1)
    prompts = [prompt_of([n] * 8, n) for n in range(12)]
    front.put(prompts)
    front.send()
    assert [prompt.key.number for prompt in front.sent] == [0, 1, 2]
    for number in (4, 7, 10):  # those that are held for worker 1
        front.backlog.remove(prompts[number].key)
    front.step(1)
    assert front.sent[-1].key.number == 9


def test_idle_worker_steals_siblings_only_if_waiting_costs_more() -> None:
    """A prefix of 16 tokens is 304 units of work, a row behind it 36."""
    prompts = [prompt_of([0] * 4 * BLOCK + [n], n) for n in range(40)]
    for lane, rows, workers in (
        (Lane.FIRST, 6, WORKERS),
        (Lane.LATER, 6, 1),
        (Lane.REST, 6, 1),
        (Lane.LATER, 40, WORKERS),
    ):
        front = Front(tau=1)
        front.put(prompts[:rows], lane)
        front.send()
        front.drain()
        assert sum(bool(worker.cache) for worker in front.workers) == workers, (lane, rows)
        assert len(front.sent) == rows


def test_first_lane_request_is_stolen_from_behind_best_effort_siblings() -> None:
    front = Front(tau=1)
    siblings = [prompt_of([0] * 4 * BLOCK + [n], n) for n in range(6)]
    long_ones = [prompt_of([1, n] * 15, 6 + n) for n in range(1, WORKERS)]
    waited_for = prompt_of([0] * 4 * BLOCK + [1, 1], 10)
    front.put(siblings[:1], Lane.LATER)
    front.put(long_ones)  # one for each other worker
    front.send()
    assert [len(worker.queue) for worker in front.workers] == [1] * WORKERS
    front.put(siblings[1:], Lane.LATER)
    front.put([waited_for])
    front.step(1)
    assert front.sent[WORKERS:] == [waited_for]


def test_put_reports_a_full_batch_for_an_idle_worker_immediately() -> None:
    front = Front(tau=3 * quadratic_work(0, BLOCK) - 1)
    prompts = prompts_of([[number] * BLOCK for number in range(9 * WORKERS)])
    held = enumerate(map(HeldRequest, prompts))
    full_at_once = [number for number, each in held if front.backlog.put(each)]
    assert full_at_once == list(range(2 * WORKERS, 9 * WORKERS))  # from the third one of each on
    front.send()
    assert len(front.backlog) == 6 * WORKERS
    last = HeldRequest(prompt_of([99] * BLOCK, 99))
    assert not front.backlog.put(last)  # saturated: it waits with the others


def test_first_lane_request_is_dispatched_early_and_a_tail_is_not() -> None:
    one = quadratic_work(0, BLOCK)
    front = Front(tau=2 * one)
    texts = [[number] * BLOCK for number in range(3 * WORKERS)]
    front.put(prompts_of(texts), Lane.LATER)
    front.send()
    front.begin(0)
    assert front.router.queued(0) == one
    assert len(front.backlog) == WORKERS  # a tail of one each
    front.put([prompt_of([90] * BLOCK, 90)])
    front.send()
    assert front.sent[-1].key.number == 90
    assert len(front.backlog) == WORKERS
    front.drain()
    assert len(front.backlog) == 0


@few
@given(
    st.lists(st.tuples(token_lists, st.booleans()), min_size=1, max_size=40),
    taus,
    st.lists(st.integers(0, WORKERS - 1), max_size=30),
)
def test_ls_dispatch_is_independent_of_best_effort_work(
    texts: list[tuple[list[int], bool]], tau: int, steps: list[int]
) -> None:
    """Checked with routers that see all requests in the workers' logs, as with a bulk job."""
    both, alone = Front(tau), Front(tau)
    for index, (tokens, is_ls) in enumerate(texts):
        priority = Priority.LS if is_ls else Priority.BE
        prompt = structs.replace(prompt_of(tokens, index), priority=priority, hashes=())
        for front in (both, alone) if is_ls else (both,):
            front.put([prompt], Lane.FIRST if is_ls else Lane.LATER)
            front.send()
        for worker in range(WORKERS):
            assert both.router.load(worker, Priority.LS) <= both.router.load(worker)
        assert [p.key for p in both.sent if p.priority is Priority.LS] == [
            p.key for p in alone.sent
        ]
    for worker in steps:
        both.step(worker)
    both.drain()
    assert len(both.sent) == len(texts)


lanes = st.lists(st.sampled_from(Lane), min_size=1, max_size=30)


def filled(lanes_: Sequence[Lane]) -> WorkerQueue:
    line = WorkerQueue()
    for number, lane in enumerate(lanes_):
        line.add(HeldRequest(prompt_of([number], number), lane))
    return line


def drained(line: WorkerQueue) -> list[RequestKey]:
    """Pop the next request for a worker that takes both classes until there is none."""
    order = []
    while (key := line.first() or line.later()) is not None:
        line.pop(key)
        order.append(key)
    return order


@given(lanes)
def test_requests_leave_once_in_lane_order_with_best_effort_last(given: list[Lane]) -> None:
    order = [key.number for key in drained(filled(given))]
    assert sorted(order) == list(range(len(given)))
    for lane in Lane:
        of_lane = [number for number in order if given[number] is lane]
        assert of_lane == sorted(of_lane)
    later = given.count(Lane.LATER)
    assert all(given[number] is not Lane.LATER for number in order[: len(order) - later])


@few
@given(lanes, lanes)
def test_first_and_rest_lanes_alternate(some: list[Lane], more: list[Lane]) -> None:
    both = [lane for lane in (*some, *more) if lane is not Lane.LATER]
    order = [both[key.number] for key in drained(filled(both))]
    fewer = min(both.count(Lane.FIRST), both.count(Lane.REST))
    assert order[: 2 * fewer] == [Lane.FIRST, Lane.REST] * fewer


@few
@given(lanes)
def test_last_yields_newest_of_each_lane_longest_wait_first(given: list[Lane]) -> None:
    lasts = {lane: number for number, lane in enumerate(given)}
    order = sorted(lasts, reverse=True)
    assert [(lane, key.number) for lane, key in filled(given).last()] == [
        (n, lasts[n]) for n in order
    ]
