"""The prefix index against one set per worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.routing.prefix_index import PrefixIndex

WORKERS = 3
NUMBERS = 8
digests = st.integers(0, NUMBERS - 1).map(lambda number: bytes([number]))
changes = st.lists(
    st.tuples(st.integers(0, WORKERS - 1), st.sets(digests), st.booleans()), max_size=20
)
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


@given(changes, st.integers(0, WORKERS - 1))
def test_index_equals_a_set_per_worker(
    steps: list[tuple[int, set[bytes], bool]], cleared: int
) -> None:
    index, sets = built(steps)
    for _ in range(2):
        assert len(index) == len(set().union(*sets))
        for digest in map(bytes, ([number] for number in range(NUMBERS))):
            assert index.matches([digest]) == [int(digest in held) for held in sets]
        index.clear(cleared)
        sets[cleared].clear()
