"""A generation among choices, against a slow reading of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.choice_matcher import ChoiceMatcher

EOS = 9
tokens = st.integers(0, 2)
choice_lists = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=200)
@given(choice_lists, st.lists(st.one_of(tokens, st.just(EOS)), max_size=5))
def test_it_is_at_its_end_where_no_choice_goes_on_and_allows_what_one_goes_on_with(
    choices: list[list[int]], generated: list[int]
) -> None:
    way = ChoiceMatcher(choices)
    for token in generated:
        way.step(token)
    count = len(generated)
    matching = [choice for choice in choices if choice[:count] == generated]
    followers = {choice[count] for choice in matching if len(choice) > count}
    assert way.is_complete == (not followers)
    ends = not matching or any(len(choice) == count for choice in matching)
    allowed = way.allowed_tokens([EOS])
    assert set(allowed) == followers | ({EOS} if ends else set())
    assert len(allowed) == len(set(allowed))
