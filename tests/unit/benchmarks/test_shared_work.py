"""What the benchmark of shared prefixes holds the workers against."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_work import least_tokens


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=10))
def test_the_least_tokens_are_the_distinct_heads_of_all_prompts(prompts: list[list[int]]) -> None:
    heads = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert least_tokens(prompts) == len(heads)
