"""Choice of an attention rank, and its prefix table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.least_work_placer import PrefixTable, RankView, least_work
from contracts.block_hash import chain_hashes


def view(name: str, load: int = 0, prefix: int = 0) -> RankView:
    return RankView(name=name, load_tokens=load, prefix_tokens=prefix)


def test_least_loaded_rank_is_chosen_without_match() -> None:
    assert least_work([view("a", load=50), view("b", load=20), view("c", load=30)]).name == "b"


def test_longest_prefix_is_chosen_on_equal_load() -> None:
    assert least_work([view("a"), view("b", prefix=16), view("c", prefix=32)]).name == "c"


def test_shared_prefix_does_not_overload_one_rank() -> None:
    assert least_work([view("a", load=1000, prefix=64), view("b")]).name == "b"


def test_first_of_equal_ranks_is_chosen() -> None:
    assert least_work([view("a"), view("b")]).name == "a"


@given(
    views=st.lists(
        st.builds(
            RankView,
            name=st.text(max_size=3),
            load_tokens=st.integers(0, 99),
            prefix_tokens=st.integers(0, 99),
        ),
        min_size=1,
    )
)
def test_chosen_rank_has_least_work(views: list[RankView]) -> None:
    chosen = least_work(views)
    assert chosen in views
    assert all(
        chosen.load_tokens - chosen.prefix_tokens <= other.load_tokens - other.prefix_tokens
        for other in views
    )


@given(
    tokens=st.lists(st.integers(0, 3), max_size=20), other=st.lists(st.integers(0, 3), max_size=20)
)
def test_match_counts_common_leading_blocks(tokens: list[int], other: list[int]) -> None:
    table = PrefixTable(100)
    table.add(chain_hashes(tokens, 2))
    common = 0
    while (common + 1) * 2 <= min(len(tokens), len(other)) and (
        tokens[: (common + 1) * 2] == other[: (common + 1) * 2]
    ):
        common += 1
    assert table.match(chain_hashes(other, 2)) == common


def test_oldest_chain_is_evicted_from_its_end() -> None:
    table = PrefixTable(4)
    old, new = chain_hashes(range(6), 2), chain_hashes(range(10, 14), 2)
    table.add(old)
    table.add(new)
    assert table.match(new) == 2
    assert table.match(old) == 2  # its third block is evicted
