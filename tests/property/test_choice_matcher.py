"""`ChoiceMatcher` against a slow reference."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.choice_matcher import ChoiceMatcher

EOS = 9
tokens = st.integers(0, 2)
choice_lists = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=200)
@given(choice_lists, st.lists(st.one_of(tokens, st.just(EOS)), max_size=5))
def test_allowed_tokens_and_completion_match_slow_reference(
    choices: list[list[int]], generated: list[int]
) -> None:
    matcher = ChoiceMatcher(choices)
    for token in generated:
        matcher.step(token)
    count = len(generated)
    matching = [choice for choice in choices if choice[:count] == generated]
    followers = {choice[count] for choice in matching if len(choice) > count}
    assert matcher.is_complete == (not followers)
    ends = not matching or any(len(choice) == count for choice in matching)
    allowed = matcher.allowed_tokens([EOS])
    assert set(allowed) == followers | ({EOS} if ends else set())
    assert len(allowed) == len(set(allowed))
