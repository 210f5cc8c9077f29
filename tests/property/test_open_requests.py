"""What a worker's open requests promise, against all their blocks, listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.routing import Prompt
from planner.open_requests import OpenRequests
from tests.routing import prompt_of, quadratic_work, token_lists

steps = st.lists(st.tuples(token_lists, st.integers(0, 9)), max_size=25)


@given(steps)
def test_a_block_is_promised_as_long_as_some_open_prompt_has_it(
    steps: list[tuple[list[int], int]],
) -> None:
    books, opened = OpenRequests(quadratic_work), list[Prompt]()
    for number, (tokens, ends) in enumerate(steps):
        before = _blocks(opened)
        opened.append(prompt_of(tokens, number))
        assert set(books.open(opened[-1], 0)) == _blocks(opened) - before
        assert set(books.promised()) == _blocks(opened)
        if ends < len(opened):
            before = _blocks(opened)
            ended = opened.pop(ends)
            broken = books.close(ended.key)
            assert len(broken) == len(set(broken))
            assert set(broken) == before - _blocks(opened)
    for prompt in opened:
        books.close(prompt.key)
    assert books.promised() == []


def _blocks(prompts: list[Prompt]) -> set[bytes]:
    return {digest for prompt in prompts for digest in prompt.hashes}
