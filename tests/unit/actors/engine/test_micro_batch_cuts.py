"""Cuts of batches into micro-batches, and their dependencies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.batching.scheduled_batch import Chunk, ScheduledBatch
from actors.engine.micro_batch import BatchPart, cut_batch
from contracts.plan import Order, Plan
from contracts.requests import Priority
from models.decoder.batch import BlockCopy


def batch_of(spans: list[tuple[int, int]], after: dict[int, set[int]] | None = None) -> Any:
    chunks = [
        Chunk(SimpleNamespace(name=index), start, stop, frozenset((after or {}).get(index, ())))  # type: ignore[arg-type]
        for index, (start, stop) in enumerate(spans)
    ]
    return ScheduledBatch(1, Priority.LS, chunks)


def shape(parts: list[BatchPart]) -> list[list[tuple[int, int, int]]]:
    return [
        [(chunk.sequence.name, chunk.start, chunk.stop) for chunk in part.chunks]  # type: ignore[attr-defined]
        for part in parts
    ]


def cut(batch: ScheduledBatch, plan: Plan) -> list[BatchPart]:
    return cut_batch(batch, plan, [float(chunk.stop - chunk.start) for chunk in batch.chunks])


def test_sequences_sharing_blocks_are_not_cut_lengthwise() -> None:
    batch = batch_of([(0, 64), (32, 96)], after={1: {0}})
    parts = cut(batch, Plan(r1=2, sequence_chunks=(0.5, 1.0)))
    assert shape(parts) == [[(0, 0, 64), (1, 32, 96)]]


def test_only_first_piece_makes_copies() -> None:
    batch = batch_of([(0, 1), (5, 45)])
    copies = (BlockCopy(3, 9, 0, 5),)
    batch.chunks[1] = batch.chunks[1]._replace(copies=copies)
    parts = cut(batch, Plan(r1=2, sequence_chunks=(0.5, 1.0)))
    assert shape(parts) == [[(1, 5, 25)], [(0, 0, 1), (1, 25, 45)]]
    assert [[chunk.copies for chunk in part.chunks] for part in parts] == [[copies], [(), ()]]


def test_unsuitable_sizes_are_balanced() -> None:
    plan = Plan(r1=2, micro_batch_samples=(1, 3))
    assert [len(part.chunks) for part in cut(batch_of([(0, 10)] * 4), plan)] == [1, 3]
    assert [len(part.chunks) for part in cut(batch_of([(0, 10)] * 6), plan)] == [3, 3]


chunk_ends = st.lists(st.floats(0.05, 0.95), max_size=3, unique=True).map(
    lambda ends: (*sorted(ends), 1.0) if ends else ()
)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=7),
    chunk_ends,
    st.integers(1, 3),
    st.data(),
)
def test_every_token_is_in_one_part_after_its_dependencies(
    spans: list[tuple[int, int]], ends: tuple[float, ...], sets: int, data: st.DataObject
) -> None:
    after = {
        index: data.draw(st.sets(st.integers(0, index - 1), max_size=2))
        for index in range(1, len(spans))
    }
    batch = batch_of([(start, start + count) for start, count in spans], after)
    plan = Plan(order=Order.ASAS, r1=sets * max(1, len(ends)), sequence_chunks=ends)
    parts = cut(batch, plan)
    covered = [
        (name, position)
        for part in shape(parts)
        for name, start, stop in part
        for position in range(start, stop)
    ]
    assert sorted(covered) == [
        (index, position)
        for index, (start, count) in enumerate(spans)
        for position in range(start, start + count)
    ]
    part_of = {pair: number for number, part in enumerate(shape(parts)) for pair in part}
    waits_for: list[set[int]] = []  # also through others
    for number, part in enumerate(parts):
        assert all(other < number for other in part.after)
        waits_for.append(set(part.after).union(*(waits_for[other] for other in part.after)))
        for chunk in part.chunks:
            index = chunk.sequence.name  # type: ignore[attr-defined]
            needed = {p for (name, _, _), p in part_of.items() if name in after.get(index, ())}
            earlier = {p for (name, _, stop), p in part_of.items()
                       if name == index and stop <= chunk.start}  # fmt: skip
            assert (needed | earlier) - {number} <= waits_for[number]
