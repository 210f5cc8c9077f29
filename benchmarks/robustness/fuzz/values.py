"""Odd values: numbers at the edges of their types, strings that break parsers, literals that are
no JSON."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.robustness.fuzz.trees import Members, Raw

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
CHARACTERS = [
    "a",
    " ",
    "\n",
    "\0",
    "é",
    "\u0301",
    "{text}",
    "\U0001f44d",
    "ab ",
    "{",
    "0",
    "a b c d ",
]
SIZES = [5, 17, 17, 100, 100, 1000, 5000]
HUGE_SIZES = [20_000, 100_000, 400_000]
HUGE_SHARE = 0.02  # of what could be huge: most requests should be quick


def number(dice: random.Random) -> Any:
    if dice.random() < 0.2:
        return Raw(dice.choice(LITERALS))
    value = dice.choice(NUMBERS)
    if dice.random() < 0.1:
        return -value
    return Raw(str(value)) if isinstance(value, int) else value


def string(dice: random.Random) -> str:
    """Short as a rule, at times up to half a megabyte."""
    if dice.random() < 0.8:
        return dice.choice(STRINGS)
    return dice.choice(CHARACTERS) * size(dice)


def size(dice: random.Random) -> int:
    return dice.choice(HUGE_SIZES if dice.random() < HUGE_SHARE else SIZES)


def anything(dice: random.Random) -> Any:
    """Of any type."""
    makers = (
        *(lambda: None, lambda: True, lambda: False, list, Members),
        *(lambda: number(dice), lambda: string(dice), lambda: nested(dice)),
        lambda: [number(dice)],
        lambda: [string(dice), number(dice), None],
        lambda: Members([(string(dice), number(dice))]),
        lambda: Raw(dice.choice(LITERALS)),
    )
    return dice.choice(makers)()


def nested(dice: random.Random) -> Raw:
    """Lists or objects, some levels deep or very many."""
    depth = dice.choice([3, 30, 500, 1500])
    if dice.random() < HUGE_SHARE:
        depth = 50_000
    if dice.random() < 0.5:
        return Raw("[" * depth + "]" * depth)
    return Raw('{"a":' * depth + "1" + "}" * depth)
