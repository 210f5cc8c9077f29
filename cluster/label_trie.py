"""The labels of a classification as a trie of tokens, and the passes that score all of it.

    labels          a b | a c d e | f            passes            scores
                                                 prompt            a, f
         (prompt)── a ── b                       prompt a          b, c
              │     └─── c ── d ── e             prompt a c d      d on the way, e
              └──── f

A pass asks for the tokens that may follow its last one, and for those of its own that nothing else
could have followed. So with shared prefixes each position is computed once from which a label goes
on, and no more: none at all beyond the prompt for labels of one token each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec

Path = tuple[int, ...]


class LabelPass(msgspec.Struct, frozen=True):
    """The prompt followed by `path`. candidates: the tokens wanted after it. scored_from: index in
    `path` of the first token whose own log-probability is wanted."""

    path: Path
    scored_from: int
    candidates: list[int]

    def edges(
        self, token_logprobs: Sequence[float], candidate_logprobs: Sequence[float]
    ) -> dict[Path, float]:
        """Log-probability of the last token of each path, given the prompt and what is before."""
        first = self.scored_from
        on_the_way = {
            self.path[: first + index + 1]: logprob for index, logprob in enumerate(token_logprobs)
        }
        ends = zip(self.candidates, candidate_logprobs, strict=True)
        return on_the_way | {(*self.path, token): logprob for token, logprob in ends}


def label_passes(label_ids: Sequence[Sequence[int]]) -> Sequence[LabelPass]:
    """Enough passes for all labels, as few as can be; that over the prompt alone, if there is one,
    is the first. Each label has at least one token."""
    return _passes(tuple(map(tuple, label_ids)))


@functools.lru_cache(maxsize=256)  # rows of one task have the same labels
def _passes(label_ids: tuple[Path, ...]) -> tuple[LabelPass, ...]:
    followers: dict[Path, dict[int, None]] = {}
    for ids in label_ids:
        for end, token in enumerate(ids):
            followers.setdefault(ids[:end], {})[token] = None
    passes: list[LabelPass] = []
    starts: list[Path] = [()]
    for start in starts:  # grows on the way
        path = start
        while len(followers[path]) == 1 and (longer := (*path, *followers[path])) in followers:
            path = longer
        passes.append(LabelPass(path, len(start), list(followers[path])))
        starts += [(*path, token) for token in followers[path] if (*path, token) in followers]
    return tuple(passes)


def label_logprobs(label_ids: Sequence[Sequence[int]], edges: Mapping[Path, float]) -> list[float]:
    """Per label, the sum over its tokens: the log of the probability that the model writes it."""
    return [math.fsum(edges[tuple(ids[: end + 1])] for end in range(len(ids))) for ids in label_ids]
