"""The index of all workers' blocks against one set per worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.prefix_index import PrefixIndex

WORKERS = 3
digests = st.integers(0, 7).map(lambda number: bytes([number]))
changes = st.lists(st.tuples(st.integers(0, WORKERS - 1), digests, st.booleans()), max_size=40)
chains = st.permutations([bytes([number]) for number in range(8)])


def built(steps: list[tuple[int, bytes, bool]]) -> tuple[PrefixIndex, list[set[bytes]]]:
    index, sets = PrefixIndex(WORKERS), [set[bytes]() for _ in range(WORKERS)]
    for worker, digest, held in steps:
        index.put(worker, digest, held=held)
        (sets[worker].add if held else sets[worker].discard)(digest)
    return index, sets


@given(changes, changes, chains)
def test_a_match_is_the_longest_unbroken_run_from_the_first_block_on(
    here: list[tuple[int, bytes, bool]],
    there: list[tuple[int, bytes, bool]],
    chain: list[bytes],
) -> None:
    (index, sets), (beside, others) = built(here), built(there)
    assert index.matches(chain) == [_run(chain, held) for held in sets]
    assert [index.match(worker, chain) for worker in range(WORKERS)] == index.matches(chain)
    both = [mine | theirs for mine, theirs in zip(sets, others, strict=True)]
    assert index.matches(chain, beside) == [_run(chain, held) for held in both]


@given(changes, st.integers(0, WORKERS - 1), st.sets(digests))
def test_adding_many_is_adding_each(
    steps: list[tuple[int, bytes, bool]], worker: int, more: set[bytes]
) -> None:
    (index, sets), (single, _) = built(steps), built(steps)
    index.add(worker, sorted(more))
    for digest in more:
        single.put(worker, digest, held=True)
    for number in range(8):
        assert index.matches([bytes([number])]) == single.matches([bytes([number])])
    sets[worker] |= more
    assert len(index) == len(set().union(*sets))


@given(changes, st.integers(0, WORKERS - 1), st.data())
def test_discarding_many_is_discarding_each(
    steps: list[tuple[int, bytes, bool]], worker: int, data: st.DataObject
) -> None:
    (index, sets), (single, _) = built(steps), built(steps)
    fewer = data.draw(st.lists(st.sampled_from(sorted(sets[worker])), unique=True)
                      if sets[worker] else st.just([]))  # fmt: skip
    index.discard(worker, fewer)
    for digest in fewer:
        single.put(worker, digest, held=False)
    for number in range(8):
        assert index.matches([bytes([number])]) == single.matches([bytes([number])])
    sets[worker] -= set(fewer)
    assert len(index) == len(set().union(*sets))


def _run(chain: list[bytes], held: set[bytes]) -> int:
    return next((i for i, digest in enumerate(chain) if digest not in held), len(chain))
