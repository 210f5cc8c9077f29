"""JSON as a tree that can also say what no JSON library would write: keys twice, NaN, lone
surrogates, any bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any


class Members(list[tuple[str, Any]]):
    """An object: its members in order, keys repeated or not."""


class Raw(str):
    """JSON text that is written as it stands."""


Path = tuple[int, ...]


def tree_of(value: Any) -> Any:
    """`value`, as json.loads gives it, with Members for its dicts."""
    if isinstance(value, dict):
        return Members((key, tree_of(item)) for key, item in value.items())
    if isinstance(value, list):
        return [tree_of(item) for item in value]
    return value


def text_of(tree: Any, *, escape: bool = True) -> bytes:
    """The tree as JSON. escape: everything beyond ASCII as \\u."""
    pieces: list[str] = []
    _write(tree, pieces, encode_basestring_ascii if escape else encode_basestring)
    return "".join(pieces).encode("utf-8", "surrogatepass")


def _write(tree: Any, pieces: list[str], quoted: Callable[[str], str]) -> None:
    if isinstance(tree, Raw):
        pieces.append(tree)
    elif isinstance(tree, str):
        pieces.append(quoted(tree))
    elif isinstance(tree, Members):
        pieces.append("{")
        for number, (key, item) in enumerate(tree):
            pieces.append(f"{', ' if number else ''}{quoted(key)}: ")
            _write(item, pieces, quoted)
        pieces.append("}")
    elif isinstance(tree, list):
        pieces.append("[")
        for number, item in enumerate(tree):
            pieces.append(", " if number else "")
            _write(item, pieces, quoted)
        pieces.append("]")
    else:
        pieces.append(json.dumps(tree))


def nodes(tree: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all nodes, the root's (empty) first."""
    yield path
    if isinstance(tree, list):  # Members too
        for index, item in enumerate(tree):
            yield from nodes(item[1] if isinstance(tree, Members) else item, (*path, index))


def at(tree: Any, path: Path) -> Any:
    for index in path:
        tree = tree[index][1] if isinstance(tree, Members) else tree[index]
    return tree


def replaced(tree: Any, path: Path, new: Any) -> Any:
    """A tree with `new` at `path`; what is not on the way there is shared with `tree`."""
    if not path:
        return new
    index, *rest = path
    if isinstance(tree, Members):
        key, item = tree[index]
        return Members([*tree[:index], (key, replaced(item, tuple(rest), new)), *tree[index + 1 :]])
    return [*tree[:index], replaced(tree[index], tuple(rest), new), *tree[index + 1 :]]
