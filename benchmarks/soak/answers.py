"""Honest requests: those whose answer is known from the start of the run, and fresh ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.fuzz.requests import JSON, Made
from contracts.config import BUNDLED

SPAM = "WINNER! Claim your free 1000 pound prize now, call before midnight."
CHAT = [{"role": "user", "content": f"Is this message spam?\n{SPAM}"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
PLACES = 3  # decimals of probabilities that are compared: a batch changes the seventh

KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": f"Message: {SPAM}\nSpam:", "max_tokens": 8, **GREEDY}),
    ("/v1/completions", {"prompt": "Review: It broke.\nSentiment:", "max_tokens": 1, **GREEDY}),
    ("/v1/completions", {"prompt": "The", "max_tokens": 12, "stop": ["\n"], **GREEDY}),
    ("/v1/completions", {"prompt": "The", "max_tokens": 6, "temperature": 1.0, "seed": 7}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12, "temperature": 0}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12, "stream": True, **GREEDY}),
    (
        "/v1/classify",
        {
            "input": [SPAM, "Running late, order me a coffee?"],
            "template": "Message: {text}\nSpam:",
            "labels": ["no", "yes"],
        },
    ),
    (
        "/v1/classify",
        {
            "input": "My card was swallowed by the machine",
            "template": "{text}\n{options}\nAnswer:",
            "labels": ["card swallowed", "exchange rate", "card arrival"],
        },
    ),
    (
        "/v1/score",
        {"query": "Review: good.\nSentiment:", "items": [""], "label_token_ids": [60, 9]},
    ),
    # Left out where the server does not know the field.
    (
        "/v1/completions",
        {"prompt": "Answer:", "guided_choice": ["yes", "no"], "max_tokens": 8, "temperature": 0},
    ),
    (
        "/v1/completions",
        {"prompt": "a a a a", "max_tokens": 8, "repetition_penalty": 1.3, **GREEDY},
    ),
    ("/v1/completions", {"prompt": "a b", "max_tokens": 8, "logit_bias": {"60": 5.0}, **GREEDY}),
    ("/v1/completions", {"prompt": "The", "max_tokens": 6, "min_p": 0.1, "seed": 3}),
]
WORDS = """a the is it message review free prize card bank late coffee good bad call now
you we""".split()  # noqa: SIM905


def made(path: str, body: dict[str, Any], key: str | None) -> Made:
    bearer = [("authorization", f"Bearer {key}")] if key else []
    named = {"model": BUNDLED, **body}
    return Made(0, "POST", path, "", [("content-type", JSON), *bearer], msgspec.json.encode(named))


def fresh(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that nobody has sent before: its blocks push others out of the cache."""
    text = " ".join(dice.choices(WORDS, k=dice.randrange(5, 150)))
    if dice.random() < 0.4:
        labels = {"labels": ["no", "yes"], "template": "Message: {text}\nSpam:"}
        return "/v1/classify", {"input": text, **labels}
    body = {"max_tokens": dice.randrange(1, 16), "stream": dice.random() < 0.5}
    if dice.random() < 0.5:
        return "/v1/completions", {"prompt": text, **body}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}


def said(body: bytes) -> Any:
    """What an answer says, without what may differ between two answers to one request."""
    if body.startswith(b"data: "):
        return _streamed(body.decode().split("\n\n")[:-1])
    answer = msgspec.json.decode(body)
    if "choices" in answer:
        return [[_text(choice), choice["finish_reason"]] for choice in answer["choices"]]
    if "data" in answer:
        return [[row["label"], _rounded(row["probs"])] for row in answer["data"]]
    return [_rounded(scores) for scores in answer["scores"]]


def _streamed(events: Sequence[str]) -> Any:
    """As `said` of a whole answer. Raises ValueError if the stream did not end as it should."""
    if not events or events[-1] != "data: [DONE]":
        raise ValueError(f"the stream ends with {events[-1:]!r}")
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for event in events[:-1]:
        chunk = msgspec.json.decode(event.removeprefix("data: "))
        if "error" in chunk:
            raise ValueError(f"the stream failed: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text(choice)
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return [[texts[index], reasons[index]] for index in sorted(texts)]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return message.get("content") or ""


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, PLACES) for value in values]


def same(got: Any, expected: Any) -> bool:
    """Equal, but for a last decimal of probabilities that rounding may turn."""
    if isinstance(expected, float):
        return isinstance(got, float) and abs(got - expected) < 2.0 * 10**-PLACES
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(same(one, other) for one, other in zip(got, expected, strict=True))
        )
    return bool(got == expected)
