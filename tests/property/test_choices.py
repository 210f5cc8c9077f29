"""Token choices: the matcher of a generation, and the passes over a trie of labels."""

import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.classification.classify import LabelPass, LabelTrie
from contracts.token_trie import ChoiceMatcher

EOS = 9
BYTES_PER_TOKEN = 512
Path = tuple[int, ...]
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


labels_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=9)


def logprob(path: Path) -> float:
    """Return a made-up log-probability of the last token given the path."""
    return -math.log(2 + hash(path) % 1000)


def answer(each: LabelPass) -> dict[int, float]:
    """Answer the pass as a worker would."""
    path, first = each.path, each.scored_from
    on_the_way = [logprob(path[: end + 1]) for end in range(first, len(path))]
    return each.edges(on_the_way, [logprob((*path, token)) for token in each.candidates])


@given(labels=labels_of)
def test_passes_score_each_label_by_sum_over_tokens(labels: list[list[int]]) -> None:
    trie = LabelTrie(labels)
    edges: dict[int, float] = {}
    for each in trie.passes:
        assert not edges.keys() & answer(each).keys(), "a token is scored twice"
        edges |= answer(each)
    expected = [
        math.fsum(logprob(tuple(label[: end + 1])) for end in range(len(label))) for label in labels
    ]
    assert trie.logprobs(edges) == expected


@given(labels=labels_of)
def test_each_continued_position_is_computed_once(labels: list[list[int]]) -> None:
    goes_on = {tuple(label[:end]) for label in labels for end in range(1, len(label))}
    passes = LabelTrie(labels).passes
    computed = [
        each.path[:end]
        for each in passes
        for end in range(max(1, each.scored_from), len(each.path) + 1)
    ]
    assert sorted(computed) == sorted(goes_on)
    assert passes[0].scored_from == 0, "the first pass tells the first tokens"


@pytest.mark.parametrize(
    ("labels", "paths"),
    [
        ([[1], [2], [3]], [()]),
        ([[1, 2, 3, 4]], [(1, 2, 3)]),
        ([[1], [1, 2]], [(1,)]),
        ([[1, 2], [3, 4]], [(), (1,), (3,)]),
    ],
)
def test_number_of_passes_is_minimal(labels: list[list[int]], paths: list[Path]) -> None:
    assert [each.path for each in LabelTrie(labels).passes] == paths


@pytest.mark.parametrize(("count", "tokens"), [(32, 1000), (1, 20_000)])
def test_trie_memory_is_linear_in_tokens(count: int, tokens: int) -> None:
    labels = [[label, *range(1000 + label, 999 + label + tokens)] for label in range(count)]
    tracemalloc.start()
    try:
        LabelTrie(labels)
        assert tracemalloc.get_traced_memory()[1] < BYTES_PER_TOKEN * count * tokens
    finally:
        tracemalloc.stop()


def test_label_of_context_length_is_accepted() -> None:
    label = list(range(100_000))
    trie = LabelTrie([label, label[:-1]])
    assert [len(each.path) for each in trie.passes] == [99_999]
