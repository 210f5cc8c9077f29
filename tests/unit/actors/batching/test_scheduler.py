"""Continuous batching under random arrivals, cancellations and pool pressure."""

import itertools
from collections.abc import Sequence as SequenceOf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.batching.batch_builder import ScheduledBatch
from actors.batching.observer import AdmissionLimits, RankAdmission
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import SHARED_BATCHES, Sequence
from actors.kv.block_manager import BlockManager, StateSlots
from contracts.config import ScheduleConfig
from contracts.errors import OverloadError
from contracts.messages import Submit, TokenLogprob
from contracts.requests import Caller, Priority, Sampling
from planner.scheduling.batching import (
    ALL,
    ALL_DECODES,
    BEST_EFFORT_STARTS,
    SEPARATE_BATCHES,
    BatchSelection,
)
from tests.support.manual_clock import ManualClock

BLOCK = 4
POOL_BLOCKS = 10
POOL_TOKENS = BLOCK * POOL_BLOCKS
ANONYMOUS = Caller()


class Simulation:
    """A scheduler with a simulated environment."""

    def __init__(
        self,
        *,
        max_batch_tokens: int = 12,
        max_batch_sequences: int = 4,
        pool_blocks: int = POOL_BLOCKS,
        prefix_cache: bool = True,
        share_partial: bool = True,
        num_states: int = 0,
    ) -> None:
        config = ScheduleConfig(
            max_batch_tokens=max_batch_tokens, max_batch_sequences=max_batch_sequences
        )
        self.config = config
        self.states = StateSlots(num_states, prefix_cache=prefix_cache) if num_states else None
        self.blocks = BlockManager(
            pool_blocks, prefix_cache=prefix_cache, share_partial=share_partial, states=self.states
        )
        self.scheduler = Scheduler(config, self.blocks)
        self.running: ScheduledBatch | None = None
        self.ended: list[Sequence] = []
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> tokens so far
        self.kept: dict[int, tuple[int, ...]] = {}  # state slot -> tokens so far
        self._ids = itertools.count()

    def add(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 0,
        priority: Priority = Priority.LS,
        score_from: int | None = None,
        caller: Caller = ANONYMOUS,
    ) -> Sequence:
        """Submit a request; max_tokens 0: scoring."""
        sampling = Sampling(max_tokens=max_tokens) if max_tokens else None
        submit = Submit(
            request_id=next(self._ids),
            token_ids=list(prompt),
            sampling=sampling,
            priority=priority,
            score_from=score_from,
            caller=caller,
        )
        made = Sequence((0, submit.request_id), submit, BLOCK)
        self.scheduler.add(made)
        return made

    def start(self, form: BatchSelection = ALL) -> ScheduledBatch | None:
        """Form the next batch and check its invariants."""
        before = {s.key for s in self.scheduler.sequences if s.block_table}
        batch = self.running = self.scheduler.next_batch(form)
        if batch is None:
            return None
        tokens = sum(chunk.stop - chunk.start for chunk in batch.chunks)
        assert 0 < tokens <= self.config.max_batch_tokens
        assert len(batch.chunks) <= self.config.max_batch_sequences
        assert len({chunk.sequence.key for chunk in batch.chunks}) == len(batch.chunks)
        assert batch.priority == min(chunk.sequence.priority for chunk in batch.chunks)
        new = [c.sequence for c in batch.chunks if c.sequence.key not in before]
        ls_waits = any(
            s.priority is Priority.LS and not s.block_table for s in self.scheduler.sequences
        )
        if ls_waits:
            assert all(s.priority is Priority.LS for s in new), "BE slipped past waiting LS work"
        self._run(batch)
        return batch

    def next_batch(self, selection: BatchSelection = ALL) -> ScheduledBatch:
        batch = self.scheduler.next_batch(selection)
        assert batch is not None
        return batch

    def _run(self, batch: ScheduledBatch) -> None:
        writer: dict[tuple[int, int], int] = {}
        for index, chunk in enumerate(batch.chunks):
            for position in range(chunk.start, chunk.stop):
                slot = self._slot(chunk.sequence, position)
                assert slot not in writer, "two chunks write one slot"
                self.slots[slot] = tuple(chunk.sequence.token_ids[: position + 1])
                writer[slot] = index
        self._copy(batch, writer)
        if self.states is not None:
            self._keep_states(batch)
        for index, chunk in enumerate(batch.chunks):
            for position in range(chunk.stop):
                slot = self._slot(chunk.sequence, position)
                assert self.slots[slot] == tuple(chunk.sequence.token_ids[: position + 1])
                by = writer.get(slot, index)
                assert by == index or by in chunk.after, "it shares a block and does not wait"

    def _keep_states(self, batch: ScheduledBatch) -> None:
        """All states are read before any is written: no chunk waits for another one's."""
        written: dict[int, tuple[int, ...]] = {}
        for sequence, start, stop, _, _, state in batch.chunks:
            assert state is not None
            found = () if state.source is None else self.kept[state.source]
            assert found == tuple(sequence.token_ids[:start])
            assert state.source in (None, state.slot, *batch.slots), "it may be evicted before"
            for position, slot in (*state.saves, (stop, state.slot)):
                assert slot not in written, "two chunks write one slot"
                assert start < position <= stop
                written[slot] = tuple(sequence.token_ids[:position])
        self.kept |= written

    def _copy(self, batch: ScheduledBatch, writer: dict[tuple[int, int], int]) -> None:
        """Copies of a batch are one operation: no source may be a target."""
        copied: dict[tuple[int, int], tuple[int, ...]] = {}
        for index, chunk in enumerate(batch.chunks):
            for source, block, first, last in chunk.copies:
                assert source in batch.sources, "it may be evicted before the batch has run"
                for offset in range(first, last):
                    by = writer.get((source, offset))
                    assert by is None or by in chunk.after, "it copies and does not wait"
                    assert (block, offset) not in writer, "two chunks write one slot"
                    copied[block, offset] = self.slots[source, offset]
                    writer[block, offset] = index
        assert not copied.keys() & {
            (copy.source, offset)
            for chunk in batch.chunks
            for copy in chunk.copies
            for offset in range(copy.first, copy.last)
        }, "a copy reads what another one writes"
        self.slots.update(copied)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK], position % BLOCK

    def finish(self) -> None:
        """End the batch as the finisher does."""
        assert self.running is not None
        batch, self.running = self.running, None
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if sequence.done or chunk.stop < len(sequence.token_ids):
                continue
            sampling = sequence.submit.sampling
            if sampling is not None:
                sequence.token_ids.append(len(sequence.token_ids) % 3)
            if sampling is None or sequence.generated >= sampling.max_tokens:
                sequence.done = True
                self.ended.append(sequence)
        self.scheduler.complete(batch)

    def step(self) -> int:
        """Run a batch if there is work; return the tokens computed."""
        batch = self.start()
        if batch is None:
            return 0
        self.finish()
        self.check()
        return batch.tokens

    def check(self) -> None:
        sources = self.running.sources if self.running is not None else ()
        self.blocks.check([*(s.block_table for s in self.scheduler.sequences), sources])
        if self.states is not None:
            slots = self.running.slots if self.running is not None else ()
            owned = [s.state_slot for s in self.scheduler.sequences if s.state_slot is not None]
            self.states.check([slots, owned])

    def drain(self, limit: int = 2000) -> int:
        """Run until every sequence has ended; return the number of batches."""
        if self.running is not None:
            self.finish()
        for batches in range(limit):
            if not len(self.scheduler):
                return batches
            assert self.start() is not None, "sequences wait and nothing runs"
            self.finish()
            self.check()
        raise AssertionError(f"not done after {limit} batches: livelock")


priorities = st.sampled_from(list(Priority))
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=POOL_TOKENS - 8)


class Batching(RuleBasedStateMachine):
    num_states = 0

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation(num_states=self.num_states)
        self.added: list[Sequence] = []
        self.cancelled: set[tuple[int, int]] = set()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 8),
        priority=priorities,
        score=st.booleans(),
        owner_key=st.tuples(st.sampled_from([b"", b"a", b"b"]), st.integers(0, 2)),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: Priority,
        score: bool,
        owner_key: tuple[bytes, int],
    ) -> None:
        score_from = 1 + len(prompt) // 2 if score and not max_tokens and len(prompt) > 1 else None
        caller = Caller(*owner_key)
        self.added.append(self.sim.add(prompt, max_tokens, priority, score_from, caller))

    @precondition(lambda self: self.sim.running is None)
    @rule()
    def start(self) -> None:
        waits = len(self.sim.scheduler) > 0
        assert (self.sim.start() is not None) == waits, "work waits and nothing runs"

    @precondition(lambda self: self.sim.running is not None)
    @rule()
    def finish(self) -> None:
        self.sim.finish()

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.added))
        if not sequence.done:
            self.cancelled.add(sequence.key)
        self.sim.scheduler.cancel(sequence.key)
        if not sequence.in_flight:
            assert not sequence.block_table

    @invariant()
    def the_books_balance(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        self.sim.drain()
        assert self.sim.blocks.counts["used"] == 0
        ended = {sequence.key for sequence in self.sim.ended}
        assert ended | self.cancelled == {sequence.key for sequence in self.added}


class BatchingWithStates(Batching):
    num_states = 5


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBatchingWithStates = BatchingWithStates.TestCase
TestBatchingWithStates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(prompts, st.integers(0, 8), priorities, st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    max_batch_tokens=st.integers(1, 50),
    max_batch_sequences=st.integers(1, 6),
    prefix_cache=st.booleans(),
    num_states=st.integers(0, 6),
)
def test_every_sequence_ends_under_any_limits(
    jobs: list[tuple[list[int], int, Priority, int]],
    max_batch_tokens: int,
    max_batch_sequences: int,
    prefix_cache: bool,
    num_states: int,
) -> None:
    sim = Simulation(
        max_batch_tokens=max_batch_tokens,
        max_batch_sequences=max_batch_sequences,
        prefix_cache=prefix_cache,
        num_states=num_states,
    )
    for prompt, max_tokens, priority, request in jobs:
        sim.add(prompt, max_tokens, priority, caller=Caller(request=request))
    sim.drain()
    assert len(sim.ended) == len(jobs)
    for sequence in sim.ended:
        sampling = sequence.submit.sampling
        assert sequence.generated == (sampling.max_tokens if sampling else 0)
    assert sim.blocks.counts["used"] == 0


def test_waiting_sequence_is_not_overtaken() -> None:
    sim = Simulation(max_batch_tokens=100)
    first = sim.add(range(24), 4)
    sim.start()
    long, short = sim.add(range(100, 120)), sim.add([1], priority=Priority.BE)
    sim.drain()
    assert sim.ended == [first, long, short]


def test_pool_pressure_requeues_the_youngest_of_the_lowest_class() -> None:
    sim = Simulation(max_batch_tokens=100, prefix_cache=False)
    old_be = sim.add(range(12), 16, Priority.BE)
    young_be = sim.add(range(50, 62), 16, Priority.BE)
    sim.start()
    sim.finish()
    ls = sim.add(range(100, 112), 16)
    while not sim.scheduler.requeued_total:
        assert sim.start() is not None
        sim.finish()
    assert not young_be.block_table
    assert old_be.block_table
    assert ls.block_table
    sim.drain()
    assert set(sim.ended) == {old_be, young_be, ls}
    assert all(sequence.generated == 16 for sequence in sim.ended)


def test_restarted_scoring_has_no_scores() -> None:
    """Otherwise scores would be returned twice."""
    sim = Simulation(max_batch_tokens=2, pool_blocks=3, prefix_cache=False)
    decodes = sim.add(range(BLOCK), 2 * BLOCK)
    for _ in range(BLOCK // 2):
        sim.step()
    prompted = sim.add(range(100, 100 + 2 * BLOCK), 0, Priority.BE, score_from=1)
    while True:  # the decoding sequence needs a third block while both are idle
        prompted.scored.append(TokenLogprob(-1.0))
        assert sim.start() is not None
        if sim.scheduler.requeued_total:
            break
        sim.finish()
    assert decodes.block_table
    assert not prompted.block_table
    assert not prompted.scored


def test_decodes_run_before_prompts_and_latency_sensitive_prompts_before_best_effort() -> None:
    sim = Simulation(max_batch_tokens=10)
    decoding = sim.add(range(4), 8, Priority.BE)
    sim.start()
    sim.finish()
    be, ls = sim.add(range(20, 30), priority=Priority.BE), sim.add(range(40, 46))
    batch = sim.start()
    assert batch is not None
    spans = [(chunk.sequence, chunk.stop - chunk.start) for chunk in batch.chunks]
    assert spans == [(decoding, 1), (ls, 6), (be, 3)], "the rest of be's prompt comes later"
    assert batch.priority is Priority.LS


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=5), max_size=5
    ),
    max_batch_tokens=st.integers(1, 60),
    max_batch_sequences=st.integers(1, 6),
)
def test_only_the_last_prompt_token_is_computed_twice(
    arrivals: list[list[list[int]]], max_batch_tokens: int, max_batch_sequences: int
) -> None:
    """For any chunking, with cached, pending and half-computed prefixes."""
    sim = Simulation(
        max_batch_tokens=max_batch_tokens, max_batch_sequences=max_batch_sequences, pool_blocks=400
    )
    computed = 0
    for prompts in arrivals:
        for prompt in prompts:
            sim.add(prompt)
        computed += sim.step()  # one batch, then more arrive
    while len(sim.scheduler):
        computed += sim.step()
    assert computed == least_tokens([prompt for prompts in arrivals for prompt in prompts])


def least_tokens(prompts: list[list[int]]) -> int:
    """Nodes of the prompts' trie, plus the last token of each repeated prompt."""
    nodes: set[tuple[int, ...]] = set()
    repeated = 0
    for prompt in prompts:
        repeated += tuple(prompt) in nodes
        nodes |= {tuple(prompt[:end]) for end in range(1, len(prompt) + 1)}
    return len(nodes) + repeated


# ---- turns between requests and keys

HOG = Caller(b"a", 1)


def batches_until(sim: Simulation, sequence: Sequence, limit: int = 500) -> int:
    for batches in range(limit):
        if sequence in sim.ended:
            return batches
        sim.step()
    raise AssertionError(f"not done after {limit} batches")


def crowded(**limits: Any) -> Simulation:
    """One request of 100 sequences that ran alone for some batches."""
    sim = Simulation(max_batch_tokens=64, max_batch_sequences=8, pool_blocks=2000, **limits)
    for number in range(100):
        sim.add([number, 1, 2], 50, caller=HOG)
    for _ in range(4):
        batch = sim.start()
        assert batch is not None
        assert len(batch.chunks) == 8, "alone it may have everything"
        sim.finish()
    return sim


def test_request_beside_others_has_a_share_of_each_batch() -> None:
    sim = crowded()
    small = sim.add([7, 8, 9], 4, caller=Caller(b"b", 2))
    of_hog = []
    for _ in range(4 + 2 * SHARED_BATCHES):
        batch = sim.start()
        assert batch is not None
        of_hog.append(sum(c.sequence.submit.caller == HOG for c in batch.chunks))
        sim.finish()
        assert (small in sim.ended) == (len(of_hog) >= 4), "it is in every batch"
    assert of_hog[: 4 + SHARED_BATCHES - 1] == [2] * (3 + SHARED_BATCHES)
    assert of_hog[-1] == 8


def test_long_prompt_leaves_others_their_part_of_a_batch() -> None:
    sim = Simulation(max_batch_tokens=64, pool_blocks=2000)
    long = sim.add(range(1000), caller=HOG)
    sim.step()
    assert long.num_computed == 64
    small = sim.add([7, 8, 9], 1, caller=Caller(b"b", 2))
    sim.step()
    assert sim.ended == [small]
    assert long.num_computed == 64 + 16
    sim.step()
    assert long.num_computed == 64 + 2 * 16, "for some batches more, as others may come again"


def test_key_with_many_requests_leaves_other_keys_a_place() -> None:
    sim = Simulation(max_batch_sequences=4, pool_blocks=2000)
    for number in range(30):
        sim.add([number, 1, 2], 60, caller=Caller(b"a", number))
    for _ in range(3):
        sim.step()
    small = sim.add([7, 8, 9], 4, caller=Caller(b"b", 1))
    assert batches_until(sim, small) == 4


def test_request_that_holds_all_blocks_is_requeued() -> None:
    sim = Simulation(max_batch_tokens=100, max_batch_sequences=20, prefix_cache=False)
    hogs = [sim.add([number] * 3, 25, caller=HOG) for number in range(10)]
    while sim.blocks.available:
        sim.step()
    small = sim.add([7, 8, 9, 9, 9], 2, caller=Caller(b"b", 2))
    assert batches_until(sim, small) <= 3
    assert sim.scheduler.requeued_total > 0
    sim.drain()
    assert {*hogs, small} == set(sim.ended)
    assert all(sequence.generated == 25 for sequence in hogs)


def test_queue_is_bounded_per_request() -> None:
    sim = Simulation()
    limits = AdmissionLimits("rank", 100, 100, POOL_TOKENS, max_waiting=4)
    admission = RankAdmission(limits, sim.scheduler, ManualClock())

    ids = itertools.count()

    def admitted(client: int, caller: Caller, count: int) -> int:
        for done in range(count):
            number = next(ids)
            each = Submit(request_id=number, token_ids=[1], sampling=None, caller=caller)
            try:
                admission.check(client, each)
            except OverloadError:
                return done
            sim.scheduler.add(Sequence((client, number), each, BLOCK))
        return count

    assert admitted(0, HOG, 10) == 4
    assert admitted(1, Caller(b"b", 2), 3) == 1
    assert admitted(2, HOG, 3) == 1, "another client's request of the same number is another one"
    assert [admitted(3, Caller(b"", n), 1) for n in range(4)] == [1, 1, 0, 0], "8 in all"
    started = Submit(request_id=99, token_ids=[1, 2], sampling=Sampling(max_tokens=2), generated=1)
    admission.check(4, started)  # elsewhere, and let in there


def test_form_limits_starts_per_batch() -> None:
    simulation = Simulation(max_batch_tokens=64, max_batch_sequences=16)
    for number in range(5):
        simulation.add([10 * number, 1], priority=Priority.BE)
    for started in (2, 2, 1):
        batch = simulation.next_batch(BatchSelection((Priority.BE,), starts=2))
        assert len(batch.chunks) == started


def test_batch_by_keys_keeps_the_order_and_fits() -> None:
    simulation = Simulation(max_batch_tokens=10, max_batch_sequences=4)
    running = simulation.add([1, 2, 3], max_tokens=5)
    first = simulation.next_batch()
    simulation.scheduler.complete(first)
    running.token_ids.append(7)
    be = simulation.add(range(10, 16), priority=Priority.BE)
    ls = simulation.add(range(20, 28), priority=Priority.LS)
    simulation.add([30])
    batch = simulation.next_batch(BatchSelection(keys=(be.key, running.key, ls.key)))
    assert [(c.sequence, c.stop - c.start) for c in batch.chunks] == [
        (be, 6),
        (running, 1),
        (ls, 3),
    ]
    assert batch.priority is Priority.LS
    assert simulation.scheduler.next_batch(BatchSelection(keys=(be.key, "gone"))) is None


def test_next_batch_of_each_class_is_forecast() -> None:
    sim = Simulation(max_batch_tokens=64, max_batch_sequences=64)
    for first in (0, 10):
        sim.add(range(first, first + 4), 8, Priority.BE if first else Priority.LS)
    sim.start()
    sim.finish()
    sim.add(range(20, 30), 8, Priority.LS)
    for number in range(100, 101 + BEST_EFFORT_STARTS):
        sim.add([number], 8, Priority.BE)
    decodes, ls_prompts, be_prompts = sim.scheduler.upcoming(SEPARATE_BATCHES)
    assert decodes == [(4, 5), (4, 5)]
    assert ls_prompts == [(0, 10)]
    assert be_prompts == [(0, 1)] * BEST_EFFORT_STARTS


def test_ls_decodes_precede_earlier_be_decodes() -> None:
    sim = Simulation(max_batch_tokens=2)
    be = [sim.add([number], 8, Priority.BE) for number in (1, 2)]
    sim.start()
    sim.finish()
    ls = sim.add([3], 8)
    sim.start(BatchSelection((Priority.LS,)))
    sim.finish()
    batch = sim.start(ALL_DECODES)
    assert batch is not None
    assert [chunk.sequence for chunk in batch.chunks] == [ls, be[0]]
