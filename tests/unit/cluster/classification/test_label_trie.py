"""Memory of label tries with many long labels."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from cluster.classification.label_trie import LabelTrie

BYTES_PER_TOKEN = 512


def peak_bytes(labels: Sequence[Sequence[int]]) -> int:
    tracemalloc.start()
    try:
        LabelTrie(labels)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "tokens"), [(32, 1000), (1, 20_000)])
def test_trie_memory_is_linear_in_tokens(count: int, tokens: int) -> None:
    labels = [[label, *range(1000 + label, 999 + label + tokens)] for label in range(count)]
    assert peak_bytes(labels) < BYTES_PER_TOKEN * count * tokens


def test_label_of_context_length_is_accepted() -> None:
    label = list(range(100_000))
    trie = LabelTrie([label, label[:-1]])
    assert [len(each.path) for each in trie.passes] == [99_999]
    assert trie.longest == 100_000
