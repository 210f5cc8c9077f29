"""The segment allocator against a model of every byte."""

import mmap
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.channels.shm import (
    FLAG_BYTES,
    IDLE_S,
    FirstFit,
    PayloadLocation,
    SegmentAllocator,
    SegmentMemory,
)
from tests.support.channels_support import nothing_leaks  # noqa: F401

SIZE = 40
# (True, size): allocate; (False, n): free the n-th oldest of what is allocated
STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 16)), max_size=120)


@given(steps=STEPS)
@settings(deadline=None, max_examples=300)
def test_allocator_never_overlaps_and_finds_the_first_gap(steps: list[tuple[bool, int]]) -> None:
    allocator = FirstFit(SIZE)
    owner: list[int | None] = [None] * SIZE  # of each byte
    offsets: dict[int, int] = {}
    for number, (allocate, value) in enumerate(steps):
        if allocate:
            offset = allocator.allocate(value)
            fits = [s for s in range(SIZE - value + 1) if owner[s : s + value] == [None] * value]
            assert offset == (fits[0] if fits else None)
            if offset is not None:
                owner[offset : offset + value] = [number] * value
                offsets[number] = offset
        elif offsets:
            number = list(offsets)[value % len(offsets)]
            allocator.free(offsets.pop(number))
            owner = [None if o == number else o for o in owner]
        check_gaps(allocator)
        assert allocator.used == sum(o is not None for o in owner)
    for offset in offsets.values():
        allocator.free(offset)
    check_gaps(allocator)
    assert allocator.allocate(SIZE) == 0


def check_gaps(allocator: FirstFit) -> None:
    """Used and free bytes are all bytes, no two pieces overlap, and no two gaps touch."""
    gaps = allocator._gaps
    used = [(start, start + size) for start, size in allocator._sizes.items()]
    pieces = sorted(gaps + used)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert all(start < end for start, end in pieces)
    assert pieces[-1][1] == SIZE
    assert not {end for _, end in gaps} & {start for start, _ in gaps}


def plain_memory(num_bytes: int) -> SegmentMemory:
    """Return a segment of this process only."""
    return SegmentMemory(torch.zeros(num_bytes, dtype=torch.uint8), mmap.mmap(-1, FLAG_BYTES))


@given(steps=STEPS)
@settings(deadline=None, max_examples=200)
def test_payloads_keep_their_bytes_under_any_release_order(steps: list[tuple[bool, int]]) -> None:
    made: dict[int, SegmentMemory] = {}

    def new_memory(number: int, num_bytes: int) -> SegmentMemory:
        made[number] = plain_memory(num_bytes)
        return made[number]

    arena = SegmentAllocator(8, new_memory)
    held: dict[int, tuple[PayloadLocation, int]] = {}
    for number, (allocate, value) in enumerate(steps):
        if allocate:
            place = arena.allocate(value)
            bytes_of(made, place, value).fill_(number % 251)
            held[number] = (place, value)
        elif held:
            number = list(held)[value % len(held)]
            place, size = held.pop(number)
            assert bool((bytes_of(made, place, size) == number % 251).all())
            made[place.segment].flags[place.slot] = 1
        for number, (place, size) in held.items():
            assert bool((bytes_of(made, place, size) == number % 251).all())
    for place, _ in held.values():
        made[place.segment].flags[place.slot] = 1
    arena.idle(0.0)
    arena.idle(IDLE_S)
    memories = [weakref.ref(memory) for memory in made.values()]
    made.clear()
    assert not any(memory() for memory in memories[1:])
    if memories:
        arena.allocate(1)  # reclaims
        (segment,) = arena._segments.values()
        assert segment.allocator.used == 1
        assert segment.memory is memories[0]()


def bytes_of(made: dict[int, SegmentMemory], place: PayloadLocation, size: int) -> torch.Tensor:
    memory = made[place.segment].views.memory
    assert place.offset_bytes + size <= memory.numel()
    return memory[place.offset_bytes : place.offset_bytes + size]


def test_segment_without_free_slots_adds_another() -> None:
    made: list[int] = []

    def new_memory(number: int, num_bytes: int) -> SegmentMemory:
        made.append(number)
        return plain_memory(num_bytes)

    arena = SegmentAllocator(FLAG_BYTES * 4, new_memory)
    places = [arena.allocate(1) for _ in range(FLAG_BYTES + 1)]
    assert made == [0, 1]
    assert len({(place.segment, place.slot) for place in places}) == FLAG_BYTES + 1
