"""The strings of a guided choice, as a trie of tokens that a sequence walks down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ChoiceNode:
    """What has been generated is a path from the root. ends: it is one of the choices."""

    __slots__ = ("children", "ends")

    def __init__(self) -> None:
        self.children: dict[int, ChoiceNode] = {}
        self.ends = False

    @classmethod
    def root_of(cls, choices: Iterable[Sequence[int]]) -> ChoiceNode:
        root = cls()
        for choice in choices:
            node = root
            for token in choice:
                node = node.children.setdefault(token, cls())
            node.ends = True
        return root

    def allowed(self, eos_token_ids: Sequence[int]) -> list[int]:
        """The tokens that may come next: an eos only where one choice ends and another goes on."""
        return [*self.children, *eos_token_ids] if self.ends else list(self.children)
