"""The index of block contents against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.kv.block_contents import BlockContents

parents = st.sampled_from([b"", b"a"])
tokens = st.lists(st.integers(0, 2) | st.integers(2**31, 2**31 + 1), min_size=1, max_size=4)
puts = st.tuples(st.integers(0, 7), parents, tokens)
drops = st.integers(0, 7)


@given(steps=st.lists(puts | drops, max_size=30), parent=parents, wanted=tokens)
def test_longest_head_is_found_after_any_puts_and_drops(
    steps: list[tuple[int, bytes, list[int]] | int], parent: bytes, wanted: list[int]
) -> None:
    contents = BlockContents()
    noted: dict[int, tuple[bytes, list[int]]] = {}
    for step in steps:
        if isinstance(step, int):
            contents.drop(step)
            noted.pop(step, None)
        else:
            block, of, held = step
            covered = any(of == p and t[: len(held)] == held for p, t in noted.values())
            assert contents.put(block, of, held) is not covered
            if not covered:
                noted[block] = (of, held)
        contents.check()
    assert all((block in contents) == (block in noted) for block in range(8))
    heads = {block: common(t, wanted) for block, (p, t) in noted.items() if p == parent}
    found = contents.longest_head(parent, wanted)
    if found is None:
        assert not any(heads.values())
    else:
        assert heads[found.block] == found.tokens == max(heads.values())


def common(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )
