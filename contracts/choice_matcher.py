"""How far a generation has come in one of a request's choices: asked by the rank that draws its
tokens, and by whoever takes a generation over that a rank has lost."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from contracts.token_trie import ROOT, TokenTrie


class ChoiceMatcher:
    """Down the trie of the choices, as far as has been generated."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._trie, self._ends = _choice_trie(tuple(map(tuple, choices)))
        self._node: int | None = ROOT

    def step(self, token: int) -> None:
        """An eos leads out of the trie."""
        self._node = None if self._node is None else self._trie.step(self._node, token)

    @property
    def is_complete(self) -> bool:
        """Whether one of the choices is complete, and none longer can follow."""
        return self._node is None or not self._trie.followers(self._node)

    def allowed_tokens(self, eos_token_ids: list[int]) -> list[int]:
        """The tokens that may come next: an eos only where one choice ends and another goes on."""
        if self._node is None:
            return eos_token_ids
        followers = list(self._trie.followers(self._node))
        return followers + eos_token_ids if self._node in self._ends else followers


@functools.lru_cache(maxsize=64)  # requests of one job have the same choices
def _choice_trie(choices: tuple[tuple[int, ...], ...]) -> tuple[TokenTrie, frozenset[int]]:
    """The trie, and the nodes at which a choice ends."""
    trie = TokenTrie(choices)
    return trie, frozenset(trie.ends)
