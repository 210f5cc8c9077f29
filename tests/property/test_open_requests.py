"""The books of one worker's open requests, against the sums that they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.routing import OpenRequest, RequestKey
from planner.open_requests import OpenRequests
from tests.routing import prompt_of, quadratic_work, token_lists

few = st.integers(0, 20)
steps = st.lists(st.tuples(token_lists, st.integers(0, 9), few, few), max_size=25)


@given(steps)
def test_the_load_is_the_work_of_what_is_open(steps: list[tuple[list[int], int, int, int]]) -> None:
    books, opened = OpenRequests(quadratic_work), dict[RequestKey, OpenRequest]()
    for number, (tokens, other, done_tokens, until_tokens) in enumerate(steps):
        prompt = prompt_of(tokens, number)
        books.open(prompt, min(done_tokens, len(tokens) - 1))
        opened[prompt.key] = OpenRequest(prompt, min(done_tokens, len(tokens) - 1), False)
        if other < len(opened):
            request = list(opened.values())[other]
            done_tokens = min(done_tokens, request.prompt.prompt_tokens)
            until_tokens = min(until_tokens, request.prompt.prompt_tokens)
            books.advance(request.prompt.key, done_tokens, until_tokens)
            opened[request.prompt.key] = OpenRequest(
                request.prompt, done_tokens, True, until_tokens
            )
            if done_tokens == request.prompt.prompt_tokens:
                assert books.close(request.prompt.key) == opened.pop(request.prompt.key).prompt
        _check(books, list(opened.values()))
    for key in list(opened):
        books.close(key)
    assert (books.load, books.queued, books.open_tokens) == (0, 0, 0)
    assert (books.waiting, books.running) == (0, 0)


def _check(books: OpenRequests, opened: list[OpenRequest]) -> None:
    assert list(books.entries()) == opened
    assert books.prompts() == [request.prompt for request in opened]
    lengths = [(request, request.prompt.prompt_tokens) for request in opened]
    assert books.load == sum(quadratic_work(r.done_tokens, tokens) for r, tokens in lengths)
    under_way = [quadratic_work(r.done_tokens, max(r.done_tokens, r.until_tokens)) for r in opened]
    assert books.queued == books.load - sum(under_way)
    assert books.open_tokens == sum(tokens - r.done_tokens * r.started for r, tokens in lengths)
    assert books.running == sum(request.started for request in opened)
    assert books.waiting == len(opened) - books.running
