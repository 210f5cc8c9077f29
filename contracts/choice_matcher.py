"""Progress of a generation that is restricted to one of several choices.

Used by the rank that samples the tokens, and by the router when it moves a generation to another
rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from contracts.token_trie import ROOT, TokenTrie


class ChoiceMatcher:
    """Position in the trie of the choices."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._trie, self._ends = _choice_trie(tuple(map(tuple, choices)))
        self._node: int | None = ROOT

    def step(self, token: int) -> None:
        """Advance by a token. An eos token leaves the trie."""
        self._node = None if self._node is None else self._trie.step(self._node, token)

    @property
    def is_complete(self) -> bool:
        """True if a choice is complete and no longer one can follow."""
        return self._node is None or not self._trie.followers(self._node)

    def allowed_tokens(self, eos_token_ids: list[int]) -> list[int]:
        """Return the tokens that may come next.

        They include eos only at the end of a choice.
        """
        if self._node is None:
            return eos_token_ids
        followers = list(self._trie.followers(self._node))
        return followers + eos_token_ids if self._node in self._ends else followers


@functools.lru_cache(maxsize=64)  # requests of one job have the same choices
def _choice_trie(choices: tuple[tuple[int, ...], ...]) -> tuple[TokenTrie, frozenset[int]]:
    """Return the trie and the nodes at which a choice ends."""
    trie = TokenTrie(choices)
    return trie, frozenset(trie.ends)
