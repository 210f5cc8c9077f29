"""What is done to a valid body: to its tree, then to its bytes. Every function is pure in its
arguments and the dice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.robustness.fuzz import values
from benchmarks.robustness.fuzz.bodies import Documented
from benchmarks.robustness.fuzz.trees import (
    Members,
    Path,
    Raw,
    at,
    nodes,
    replaced,
    text_of,
    tree_of,
)

MAX_BYTES = 3 << 20  # of a mutated body, about: several huge values in one would only be slow
MAX_REPEATED_BYTES = 200_000
ENCODINGS = ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig"]


class Mutator:
    """Mutates bodies of one route. others: bodies of all routes, to splice from."""

    def __init__(self, documented: Documented, path: str, others: Sequence[Any]) -> None:
        self._documented = documented
        self._fields = documented.fields(path)
        self._others = others
        self._of_trees: list[Callable[[Any, random.Random], Any]] = [
            *(self._new_value, self._new_value, self._number, self._string),
            *(self._documented_field, self._documented_field, self._unknown_field),
            *(_removed, _doubled_key, _renamed_key, _wrapped, _repeated, _shuffled, self._spliced),
        ]

    def mutated(self, tree: Any, dice: random.Random) -> bytes:
        for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 6))):
            tree = dice.choice(self._of_trees)(tree, dice)
        data = text_of(tree, escape=dice.random() < 0.7)[:MAX_BYTES]
        if dice.random() < 0.1:
            data = dice.choice(OF_BYTES)(data, dice)
        return data

    def _new_value(self, tree: Any, dice: random.Random) -> Any:
        return replaced(tree, _somewhere(tree, dice), values.anything(dice))

    def _number(self, tree: Any, dice: random.Random) -> Any:
        return _at_some(tree, dice, (int, float), values.number(dice))

    def _string(self, tree: Any, dice: random.Random) -> Any:
        return _at_some(tree, dice, (str,), values.string(dice))

    def _documented_field(self, tree: Any, dice: random.Random) -> Any:
        """One of the route's own fields, with a value that fits it or with any."""
        name, schema = dice.choice(self._fields)
        fits = dice.random() < 0.6
        value = tree_of(self._documented.made(schema, dice)) if fits else values.anything(dice)
        return _with_member(tree, name, value)

    def _unknown_field(self, tree: Any, dice: random.Random) -> Any:
        return _with_member(tree, values.string(dice), values.anything(dice))

    def _spliced(self, tree: Any, dice: random.Random) -> Any:
        """A piece of another body at some place of this one."""
        other = dice.choice(self._others)
        return replaced(tree, _somewhere(tree, dice), at(other, _somewhere(other, dice)))


def _somewhere(tree: Any, dice: random.Random) -> Path:
    paths = list(nodes(tree))
    return dice.choice(paths[1:] or paths)  # the root rarely: it would end everything else


def _at_some(tree: Any, dice: random.Random, kinds: tuple[type, ...], new: Any) -> Any:
    """`new` in place of one of the nodes of these types, if there is one."""
    found = [path for path in nodes(tree) if isinstance(at(tree, path), kinds)]
    return replaced(tree, dice.choice(found), new) if found else tree


def _with_member(tree: Any, name: str, value: Any) -> Any:
    if not isinstance(tree, Members):
        return tree
    return Members([*((key, item) for key, item in tree if key != name), (name, value)])


def _objects(tree: Any) -> list[Path]:
    return [path for path in nodes(tree) if isinstance(at(tree, path), Members) and at(tree, path)]


def _removed(tree: Any, dice: random.Random) -> Any:
    """Without one member or entry."""
    path = _somewhere(tree, dice)
    if not path:
        return tree
    parent, index = at(tree, path[:-1]), path[-1]
    return replaced(tree, path[:-1], type(parent)([*parent[:index], *parent[index + 1 :]]))


def _doubled_key(tree: Any, dice: random.Random) -> Any:
    if not (objects := _objects(tree)):
        return tree
    path = dice.choice(objects)
    members = at(tree, path)
    key, item = dice.choice(members)
    value = item if dice.random() < 0.3 else values.anything(dice)
    return replaced(tree, path, Members([*members, (key, value)]))


def _renamed_key(tree: Any, dice: random.Random) -> Any:
    if not (objects := _objects(tree)):
        return tree
    path = dice.choice(objects)
    members = Members(at(tree, path))
    index = dice.randrange(len(members))
    key, item = members[index]
    odd = (key.upper(), key[1:], key + "s", f" {key}", key + "\0", values.string(dice))
    members[index] = dice.choice(odd), item
    return replaced(tree, path, members)


def _wrapped(tree: Any, dice: random.Random) -> Any:
    """One node in a list, in an object, or taken out of its own."""
    path = _somewhere(tree, dice)
    node = at(tree, path)
    ways = [[node], [[node]], Members([("text", node)]), [node, node]]
    if isinstance(node, list) and node:
        ways.append(node[0][1] if isinstance(node, Members) else node[0])
    return replaced(tree, path, dice.choice(ways))


def _repeated(tree: Any, dice: random.Random) -> Any:
    """A list blown up, or the same members many times. Text at once: trees should stay small."""
    lists = [path for path in nodes(tree) if isinstance(at(tree, path), list) and at(tree, path)]
    if not lists:
        return tree
    path = dice.choice(lists)
    node = at(tree, path)
    text = text_of(node).decode("utf-8", "surrogatepass")
    count = min(values.size(dice), 1 + MAX_REPEATED_BYTES // len(text))
    if dice.random() < 0.5 and isinstance(node[0], str):  # all of them different
        items = ", ".join(json.dumps(f"{node[0]}{number}") for number in range(count))
    else:
        items = ", ".join([text[1:-1]] * count)
    return replaced(tree, path, Raw(text[0] + items + text[-1]))


def _shuffled(tree: Any, dice: random.Random) -> Any:
    path = _somewhere(tree, dice)
    node = at(tree, path)
    if not isinstance(node, list):
        return tree
    return replaced(tree, path, type(node)(dice.sample(node, len(node))))


def _flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _without_middle(data: bytes, dice: random.Random) -> bytes:
    start, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _with_noise(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data) + 1)
    return data[:place] + dice.randbytes(dice.choice((1, 4, 64))) + data[place:]


def _twice(data: bytes, dice: random.Random) -> bytes:
    return data + dice.choice((b"", b"\n", b",", b"\0")) + data


def _recoded(data: bytes, dice: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(dice.choice(ENCODINGS), "replace")


def _other(data: bytes, dice: random.Random) -> bytes:
    return dice.choice((b"", b"null", b"[]", b'"a"', b"1", b"\0", b"{}", b"model=bundled&prompt=a"))


OF_BYTES = [_flipped, _flipped, _cut, _cut, _without_middle, _with_noise, _twice, _recoded, _other]
