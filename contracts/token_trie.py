"""Token sequences as a trie, in memory and time linear in their tokens.

    sequences       a b | a c           nodes           0 ── a:1 ── b:2
                                                              └──── c:3

Used to score or allow one of several texts. Immutable, and without recursion, so that a sequence
may be as long as a context. `ChoiceMatcher` is used by the rank that samples the tokens, and by the
router when it moves a generation to another rank.
"""

import functools
from collections.abc import Iterable, Sequence

ROOT = 0


class TokenTrie:
    """A trie whose nodes are numbers; a node stands for the tokens on the path to it.

    ends[i]: node at which sequence i ends; equal sequences share it.
    """

    __slots__ = ("_children", "_depths", "_parents", "_tokens", "ends")

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._children: list[dict[int, int] | None] = [None]
        self._parents = [ROOT]
        self._tokens = [-1]
        self._depths = [0]
        self.ends = [self._add(sequence) for sequence in sequences]

    def _add(self, sequence: Sequence[int]) -> int:
        node = ROOT
        for token in sequence:
            children = self._children[node]
            if children is None:
                children = self._children[node] = {}
            after = children.get(token)
            if after is None:
                after = children[token] = len(self._tokens)
                self._children.append(None)
                self._parents.append(node)
                self._tokens.append(token)
                self._depths.append(self._depths[node] + 1)
            node = after
        return node

    def __len__(self) -> int:
        """Return the number of nodes, including the root."""
        return len(self._tokens)

    def followers(self, node: int) -> dict[int, int]:
        """Return token → node for the tokens that may follow `node`, in the order of the sequences.

        Empty at the end of a sequence that no other one continues. Do not modify the result.
        """
        return self._children[node] or {}

    def depth(self, node: int) -> int:
        return self._depths[node]

    def path_to(self, node: int, *, start: int = 0) -> list[int]:
        """Return the nodes on the path to `node`, without the root and the first `start`."""
        nodes = []
        while self._depths[node] > start:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    def tokens_to(self, node: int) -> tuple[int, ...]:
        return tuple(self._tokens[each] for each in self.path_to(node))


class ChoiceMatcher:
    """Position in the trie of the choices."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._trie, self._ends = _choice_trie(tuple(map(tuple, choices)))
        self._node: int | None = ROOT

    def step(self, token: int) -> None:
        """Advance by a token. An eos token leaves the trie."""
        self._node = None if self._node is None else self._trie.followers(self._node).get(token)

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
