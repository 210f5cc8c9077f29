"""LS never waits for blocks that BE holds, and the block counts balance."""

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.batching.batch_builder import BatchBuilder, ScheduledBatch
from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from contracts.requests import Priority, chain_hashes
from planner.scheduling.batching import (
    BatchSelection,
    LiveBatch,
    Phase,
    SequenceView,
    WaitingWork,
    by_class,
)
from tests.unit.actors.batching.test_scheduler import Simulation

LS, BE = Priority.LS, Priority.BE
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Watched(Scheduler):
    """Record refused sequences and the order of preemption."""

    refused: set[Sequence]

    def _try_start(self, batch: BatchBuilder, sequence: Sequence) -> bool:
        return self._noted(sequence, super()._try_start(batch, sequence))

    def _try_extend(self, batch: BatchBuilder, sequence: Sequence) -> bool:
        of_ls = [s for s in self.sequences if s.priority is LS and s.block_table]
        extended = super()._try_extend(batch, sequence)
        if sequence.priority is BE:
            assert all(s.block_table for s in of_ls), "BE takes nothing from LS"
        return self._noted(sequence, extended)

    def _noted(self, sequence: Sequence, runs: bool) -> bool:
        (self.refused.discard if runs else self.refused.add)(sequence)
        return runs

    def _preempt_lower_class(self, priority: Priority) -> bool:
        held = {s: s.num_computed for s in self.sequences if s.priority is BE and s.block_table}
        idle = {s: computed for s, computed in held.items() if not s.in_flight}
        given = super()._preempt_lower_class(priority)
        gave = [s for s in held if not s.block_table]
        if priority is BE:
            assert not given
            assert not gave
        elif idle:
            assert [idle[s] for s in gave] == [min(idle.values())], "least computed first, alone"
        else:
            assert bool(gave) is given
            assert all(s.in_flight is False for s in gave), "its batch is dropped"
        return given


class View(NamedTuple):
    live: list[LiveBatch]
    count: Callable[[Priority], int]
    waiting: Callable[[Priority], WaitingWork]
    running: int
    layers: int = 2
    free_blocks: int = 0
    idle: tuple[SequenceView, ...] = ()

    @property
    def in_flight(self) -> int:
        return len(self.live)


class TwoClasses(Simulation):
    """Form batches of both classes at once, as `by_class` does."""

    def __init__(self, *, max_batch_tokens: int = 12, whole_prompts: bool = False) -> None:
        super().__init__(pool_blocks=8, max_batch_tokens=max_batch_tokens)
        self.scheduler: Watched = Watched(self.config, self.blocks, whole_prompts=whole_prompts)
        self.scheduler.refused = set()
        self.scheduler.drop_best_effort = self.drop
        self.live_batches: list[ScheduledBatch] = []
        self.dropped = 0

    def drop(self) -> ScheduledBatch | None:
        best_effort_batches = [batch for batch in self.live_batches if batch.priority is BE]
        if not best_effort_batches:
            return None
        assert not any(s.priority is BE and s.block_table and not s.in_flight for s in self.all)
        self.dropped += 1
        self.live_batches.remove(best_effort_batches[-1])
        return best_effort_batches[-1]

    @property
    def all(self) -> list[Sequence]:
        return self.scheduler.sequences

    @property
    def view(self) -> View:
        batches = [LiveBatch(b.priority, b.tokens, 1, b.number, b.phase) for b in self.live_batches]
        waiting = self.scheduler.waiting_of
        return View(batches, self.scheduler.count, waiting, self.scheduler.running)

    def form(self) -> None:
        """Form as many batches as the policy allows."""
        while True:
            for form in by_class(self.view):
                self.scheduler.refused.clear()
                batch = self.scheduler.next_batch(form)
                if any(s.priority is LS for s in self.scheduler.refused):
                    assert not any(s.priority is BE and s.block_table for s in self.all)
                    assert all(each.priority is LS for each in self.live_batches)
                if batch is not None:
                    self.live_batches.append(batch)
                    self._run(batch)
                    break
            else:
                return

    def end(self, batch: ScheduledBatch) -> None:
        self.live_batches.remove(batch)
        self.running = batch
        self.finish()

    def check(self) -> None:
        sources = [batch.sources for batch in self.live_batches]
        self.blocks.check([*(s.block_table for s in self.all), *sources])


class GivingWay(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim = TwoClasses()
        self.added: list[Sequence] = []
        self.cancelled: set[tuple[int, int]] = set()

    @rule(prompt=prompts, max_tokens=st.integers(0, 8), priority=st.sampled_from(list(Priority)))
    def arrive(self, prompt: list[int], max_tokens: int, priority: Priority) -> None:
        self.added.append(self.sim.add(prompt, max_tokens, priority))

    @rule()
    def form(self) -> None:
        self.sim.form()

    @precondition(lambda self: self.sim.live_batches)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        numbers = [batch.number for batch in self.sim.live_batches]
        number = data.draw(st.sampled_from(numbers))
        self.sim.end(next(b for b in self.sim.live_batches if b.number == number))

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.added) - 1))
        sequence = self.added[place]
        if not sequence.done:
            self.cancelled.add(sequence.key)
        self.sim.scheduler.cancel(sequence.key)

    @invariant()
    def the_books_balance(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        for _ in range(200):
            self.sim.form()
            if not self.sim.live_batches:
                break
            self.sim.end(self.sim.live_batches[0])
            self.sim.check()
        assert self.sim.blocks.counts["used"] == 0
        ended = {sequence.key for sequence in self.sim.ended}
        assert ended | self.cancelled == {sequence.key for sequence in self.added}


TestGivingWay = GivingWay.TestCase
TestGivingWay.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_prompt_too_long_for_the_batch_preempts_no_best_effort_work() -> None:
    """It lacks room in the batch, not blocks."""
    sim = TwoClasses(whole_prompts=True)
    sim.add([0] * 8, priority=BE)
    sim.form()
    for first in (0, 1):
        sim.add([first, 1] * 4, priority=LS)
    batch = sim.scheduler.next_batch(BatchSelection((LS,), Phase.PREFILL))
    assert batch is not None
    assert len(batch.chunks) == 1
    assert sim.dropped == 0


def test_copy_sources_of_be_are_evicted_before_ls_blocks() -> None:
    sim = TwoClasses()
    for tokens, priority in (([0, 0, 1], BE), ([1] * 4, LS), ([0, 0, 0], BE)):
        sim.add(tokens, priority=priority)
        sim.form()
        sim.end(sim.live_batches[0])
    assert sim.blocks.counts == {"free": 5, "cached": 3, "used": 0}
    assert sim.blocks.take([], 7) is not None
    assert sim.blocks.match(chain_hashes([1] * 4, 4), batch=9), "what LS may find again"
