"""A few token sequences as a trie: what may follow what, in memory and time linear in their tokens.

    sequences       a b | a c           nodes           0 ── a:1 ── b:2
                                                              └──── c:3

Used by whatever scores or allows one of several texts. Immutable once made; nothing in it recurses,
so a sequence may be as long as a context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0


class TokenTrie:
    """Nodes are numbers; a node stands for the tokens on the way to it. ends[i]: where sequence i
    ends (two that are equal end at the same node)."""

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
        """Nodes, the root among them."""
        return len(self._tokens)

    def followers(self, node: int) -> dict[int, int]:
        """Token -> node, for what may come after `node`, in the order of the sequences; empty at
        the end of one that no other continues. Not to be changed."""
        return self._children[node] or {}

    def step(self, node: int, token: int) -> int | None:
        """The node after `token`; None where no sequence goes on with it."""
        return self.followers(node).get(token)

    def depth(self, node: int) -> int:
        """Tokens on the way to it."""
        return self._depths[node]

    def path_to(self, node: int, *, start: int = 0) -> list[int]:
        """The nodes on the way, itself the last, without the first `start` of them (the root is
        none of them)."""
        nodes = []
        while self._depths[node] > start:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    def tokens_to(self, node: int) -> tuple[int, ...]:
        """The tokens that `node` stands for."""
        return tuple(self._tokens[each] for each in self.path_to(node))
