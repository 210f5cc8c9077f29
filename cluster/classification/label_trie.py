"""The passes that score all labels of a classification, from the trie of their tokens.

    labels          a b | a c d e | f            passes            scores
                                                 prompt            a, f
         (prompt)── a ── b                       prompt a          b, c
              │     └─── c ── d ── e             prompt a c d      d on the way, e
              └──── f

A pass scores the candidates after its last token, and those of its own tokens that had no
alternative. With shared prefixes each position that a label continues from is computed once. Labels
of one token each need no pass beyond the prompt.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

from contracts.token_trie import ROOT, TokenTrie

CACHED_TOKENS = 1024  # larger tries are not cached

Path = tuple[int, ...]


class LabelPass(msgspec.Struct, frozen=True):
    """The prompt followed by `path`, the tokens to node `end`.

    candidates: tokens to score after it.
    scored_from: index in `path` of the first token to score.
    """

    trie: TokenTrie
    end: int
    scored_from: int
    candidates: list[int]

    @property
    def length(self) -> int:
        return self.trie.depth(self.end)

    @property
    def path(self) -> Path:
        """Tokens to `end`, computed on each access: the paths take more memory than the trie."""
        return self.trie.tokens_to(self.end)

    def edges(
        self, token_logprobs: Sequence[float], candidate_logprobs: Sequence[float]
    ) -> dict[int, float]:
        """Return by trie node the log-probability of its token, given the prompt and its path."""
        path_nodes = self.trie.path_to(self.end, start=self.scored_from)
        after = self.trie.followers(self.end).values()
        scored = dict(zip(path_nodes, token_logprobs, strict=True))
        return scored | dict(zip(after, candidate_logprobs, strict=True))


class LabelTrie:
    """The labels of a row, each of at least one token.

    passes: the fewest that score all labels; the one over the prompt alone, if any, is the first.
    """

    __slots__ = ("_trie", "passes")

    def __init__(self, label_ids: Sequence[Sequence[int]]) -> None:
        self._trie = TokenTrie(label_ids)
        self.passes = tuple(_passes(self._trie))

    def __len__(self) -> int:
        return len(self._trie)

    def logprobs(self, edges: Mapping[int, float]) -> list[float]:
        """Return the log-probability of each label: the sum over its tokens.

        edges: of all passes.
        """
        trie = self._trie
        return [math.fsum(edges[node] for node in trie.path_to(end)) for end in trie.ends]


def _passes(trie: TokenTrie) -> list[LabelPass]:
    passes: list[LabelPass] = []
    starts = [ROOT]
    for start in starts:  # grows during the loop
        end, followers = start, trie.followers(start)
        while len(followers) == 1:
            (after,) = followers.values()
            if not trie.followers(after):
                break
            end, followers = after, trie.followers(after)
        passes.append(LabelPass(trie, end, trie.depth(start), list(followers)))
        starts += [after for after in followers.values() if trie.followers(after)]
    return passes


def label_trie(label_ids: Sequence[Sequence[int]]) -> LabelTrie:
    """Return the labels' trie. Rows, and requests with the same short labels, share one."""
    if sum(map(len, label_ids)) > CACHED_TOKENS:
        return LabelTrie(label_ids)
    return _cached_trie(tuple(map(tuple, label_ids)))


@functools.lru_cache(maxsize=256)
def _cached_trie(label_ids: tuple[Path, ...]) -> LabelTrie:
    return LabelTrie(label_ids)
