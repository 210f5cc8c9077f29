"""Mutations of a valid body: of its JSON value, then of its bytes. `dice` determines each of them.

`encode` also writes what no JSON library writes: repeated keys, NaN, lone surrogates, invalid text.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MAX_BYTES = 3 << 20  # of a mutated body
MAX_REPEATED_BYTES = 200_000
AGAIN = "@again@"  # suffix of a key that the text repeats
ENCODINGS = ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig"]
NUMBERS: list[int | float] = [
    *(0, -0.0, -1, 1, 2, 0.5, 1e-5, 1e-38, 1e-46, 5e-324, 1e308, -1e308, 1e16, 0.1 + 0.2),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70),
    *(3, 7, 20, 21, 127, 128, 129, 255, 256, 1024, 2047, 2048, 4096, 4097, 65536, 10**6, 10**400),
]
LITERALS = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "01", "+1", "1.", ".5", "0x10"),
    *("1E5", "1.0", "-0", "undefined", "True", "", "'a'", '"\\ud83d"', '"\\udc00\\ud800"', '"\0"'),
    *('"\\u0000"', '"\\u12"', "[1,]", "1 /* one */", '"\ud800"', "1_000", "9" * 400, "null null"),
]
STRINGS = [
    *("", " ", "\n", "\t\r\n", "\0", "a\0b", "\x7f\x80\x9f", "\ufeff", "\ufffd", "\uffff", "\\"),
    *('"', "é", "e\u0301" * 40, "\u202eabc\u202c", "\u05e9\u05dc\u05d5\u05dd", "\u200b\u200d"),
    *("\U0001f469\u200d\U0001f467", "\U00010348", "\U0010ffff", "\ufdfa" * 8, "\u0130\ufb03"),
    *("{text}", "{text}{text}", "{prefix}", "{label}", "{options}", "{", "}", "{}", "{0}"),
    *("{text!r}", "{{text}}", "{text.__class__}", "%s%n", "${x}", "{{ 7*7 }}", "{% for a in b %}"),
    *("<|im_end|>", "<|im_start|>system", "</s>", "[INST]", "<|endoftext|>", "null", "NaN", "-1"),
    *("../../etc/passwd", "'; DROP TABLE a;--", "yes", "no", "ls", "be", "user", "tool", "text"),
]
PIECES = ["a", " ", "\n", "\0", "é", "\u0301", "{text}", "\U0001f44d", "ab ", "{", "0", "a b c d "]
SIZES, HUGE_SIZES = [5, 17, 17, 100, 100, 1000, 5000], [20_000, 100_000, 400_000]
HUGE_SHARE = 0.02  # of what may be huge: most requests should be short

Slot = tuple[Any, Any]
"""A list or dict, and an index or key of it."""


class Raw(str):
    """JSON text that `encode` writes as it stands."""


def encode(value: Any, *, escape: bool = True) -> bytes:
    """JSON of `value`. escape: characters beyond ASCII as \\u."""
    raws: list[Raw] = []
    text = json.dumps(_marked(value, raws), ensure_ascii=escape).replace(AGAIN, "")
    text = re.sub(r'"@raw(\d+)@"', lambda found: raws[int(found[1])], text)
    return text.encode("utf-8", "surrogatepass")


def _marked(value: Any, raws: list[Raw]) -> Any:
    """`value` with a marker for each Raw, which is appended to `raws`."""
    if isinstance(value, Raw):
        raws.append(value)
        return f"@raw{len(raws) - 1}@"
    if isinstance(value, dict):
        return {key: _marked(item, raws) for key, item in value.items()}
    return [_marked(item, raws) for item in value] if isinstance(value, list) else value


def slots(value: Any, kind: type | tuple[type, ...] = object) -> list[Slot]:
    """All slots below `value` that hold an instance of `kind`."""
    return [(at, key) for at, key in _slots(value) if isinstance(at[key], kind)]


def _slots(value: Any) -> Iterator[Slot]:
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield value, key
        yield from _slots(value[key])


class Mutator:
    """Mutates bodies of one route. fields: names of its fields. others: bodies of all routes."""

    def __init__(self, fields: Sequence[str], others: Sequence[dict[str, Any]]) -> None:
        self._fields, self._others = fields, others
        self._all: list[Callable[[dict[str, Any], random.Random], None]] = [
            *(_set_value, _set_value, _set_number, _set_string, self._set_field, self._set_field),
            *(_add_field, _remove, _repeat_key, _rename_key, _wrap, _enlarge, _shuffle),
            self._splice,
        ]

    def mutate(self, body: dict[str, Any], dice: random.Random) -> bytes:
        """Return a mutated copy of `body` as JSON, or nearly."""
        body = copy.deepcopy(body)
        for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 6))):
            dice.choice(self._all)(body, dice)
        data = encode(body, escape=dice.random() < 0.7)[:MAX_BYTES]
        return dice.choice(OF_BYTES)(data, dice) if dice.random() < 0.1 else data

    def _set_field(self, body: dict[str, Any], dice: random.Random) -> None:
        """Set one field of the route, often to a value that another body has for it."""
        name = dice.choice(self._fields)
        known = [other[name] for other in self._others if name in other]
        is_known = known and dice.random() < 0.6
        body[name] = copy.deepcopy(dice.choice(known)) if is_known else anything(dice)

    def _splice(self, body: dict[str, Any], dice: random.Random) -> None:
        at, key = dice.choice(slots(dice.choice(self._others)))
        _set(slots(body), copy.deepcopy(at[key]), dice)


def number(dice: random.Random) -> Any:
    if dice.random() < 0.2:
        return Raw(dice.choice(LITERALS))
    value = dice.choice(NUMBERS)
    return -value if dice.random() < 0.1 else value


def string(dice: random.Random) -> str:
    """A short string, or one of up to a megabyte."""
    return dice.choice(STRINGS) if dice.random() < 0.8 else dice.choice(PIECES) * _size(dice)


def anything(dice: random.Random) -> Any:
    """A value of any type."""
    makers = (
        *(lambda: None, lambda: True, lambda: False, list, dict),
        *(lambda: number(dice), lambda: string(dice), lambda: _nested(dice)),
        lambda: [string(dice), number(dice), None],
        lambda: {string(dice): number(dice)},
        lambda: Raw(dice.choice(LITERALS)),
    )
    return dice.choice(makers)()


def _size(dice: random.Random) -> int:
    return dice.choice(HUGE_SIZES if dice.random() < HUGE_SHARE else SIZES)


def _nested(dice: random.Random) -> Raw:
    """Nested lists or objects, a few or thousands of levels deep."""
    depth = 50_000 if dice.random() < HUGE_SHARE else dice.choice([3, 30, 500, 1500])
    if dice.random() < 0.5:
        return Raw("[" * depth + "]" * depth)
    return Raw('{"a":' * depth + "1" + "}" * depth)


def _set(chosen: Sequence[Slot], value: Any, dice: random.Random) -> None:
    if chosen:
        at, key = dice.choice(chosen)
        at[key] = value


def _set_value(body: dict[str, Any], dice: random.Random) -> None:
    _set(slots(body), anything(dice), dice)


def _set_number(body: dict[str, Any], dice: random.Random) -> None:
    _set(slots(body, (int, float)), number(dice), dice)


def _set_string(body: dict[str, Any], dice: random.Random) -> None:
    _set(slots(body, str), string(dice), dice)


def _add_field(body: dict[str, Any], dice: random.Random) -> None:
    body[string(dice)] = anything(dice)


def _remove(body: dict[str, Any], dice: random.Random) -> None:
    if chosen := slots(body):
        at, key = dice.choice(chosen)
        del at[key]


def _repeat_key(body: dict[str, Any], dice: random.Random) -> None:
    if chosen := [(at, key) for at, key in slots(body) if isinstance(at, dict)]:
        at, key = dice.choice(chosen)
        at[key + AGAIN] = at[key] if dice.random() < 0.3 else anything(dice)


def _rename_key(body: dict[str, Any], dice: random.Random) -> None:
    if chosen := [(at, key) for at, key in slots(body) if isinstance(at, dict)]:
        at, key = dice.choice(chosen)
        odd = (key.upper(), key[1:], key + "s", f" {key}", key + "\0", string(dice))
        at[dice.choice(odd)] = at.pop(key)


def _wrap(body: dict[str, Any], dice: random.Random) -> None:
    """Put a value in a list or an object, or replace a list by its first entry."""
    if chosen := slots(body):
        at, key = dice.choice(chosen)
        value = at[key]
        first = value[:1] if isinstance(value, list) else []
        at[key] = dice.choice([[value], [[value]], {"text": value}, [value, value], *first])


def _enlarge(body: dict[str, Any], dice: random.Random) -> None:
    """Repeat the entries of a list, equal or all different."""
    if chosen := [(at, key) for at, key in slots(body, list) if at[key]]:
        at, key = dice.choice(chosen)
        items, text = at[key], encode(at[key]).decode("utf-8", "surrogatepass")
        count = min(_size(dice), 1 + MAX_REPEATED_BYTES // len(text))
        if dice.random() < 0.5 and isinstance(items[0], str):
            at[key] = [f"{items[0]}{index}" for index in range(count)]
        else:
            at[key] = Raw(f"[{', '.join([text[1:-1]] * count)}]")


def _shuffle(body: dict[str, Any], dice: random.Random) -> None:
    if chosen := slots(body, list):
        at, key = dice.choice(chosen)
        dice.shuffle(at[key])


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8)) if data else 0):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _cut(data: bytes, dice: random.Random) -> bytes:
    start, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:] if dice.random() < 0.3 else data[:end]


def _insert(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data) + 1)
    return data[:place] + dice.randbytes(dice.choice((1, 4, 64))) + data[place:]


def _double(data: bytes, dice: random.Random) -> bytes:
    return data + dice.choice((b"", b"\n", b",", b"\0")) + data


def _recode(data: bytes, dice: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(dice.choice(ENCODINGS), "replace")


def _replace(data: bytes, dice: random.Random) -> bytes:
    return dice.choice((b"", b"null", b"[]", b'"a"', b"1", b"\0", b"{}", b"model=bundled&prompt=a"))


OF_BYTES = [_flip, _flip, _cut, _cut, _cut, _insert, _double, _recode, _replace]
