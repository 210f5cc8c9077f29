"""A server that is asked for labels, in both ways: the likeliest by one pass, or written out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import msgspec

from benchmarks.task_templates import Posed, Row, prompt_of

ROWS_PER_REQUEST = 32
REQUESTS_AT_ONCE = 4
NEW_TOKENS = 12  # of greedy decoding: more than the longest label has
REQUEST_TIMEOUT_S = 600.0


class Question(NamedTuple):
    """One decision: which of `labels` comes after `prompt`; `gold` indexes them."""

    prompt: str
    labels: tuple[str, ...]
    gold: int


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """chosen: index of a label per question; None: nothing that could be read. probs: None where
    they are not known."""

    chosen: list[int | None]
    probs: list[list[float]] | None = None
    prompt_tokens: int = 0
    seconds: float = 0.0


class AskedServer:
    """What is asked over HTTP."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def classify(self, task: Posed, rows: Sequence[Row]) -> Answers:
        """Prefill-only."""

        def body(piece: Sequence[Row]) -> dict[str, Any]:
            if task.asks_each:
                inputs, more = [row.text for row in piece], {"template": task.template}
            else:
                inputs, more = [prompt_of(task, row) for row in piece], {}
            labels = list(piece[0].labels)
            return {"input": inputs, "labels": labels, "multi_label": task.asks_each, **more}

        started_s = time.monotonic()
        answers = self._post("/v1/classify", body, rows)
        seconds = time.monotonic() - started_s
        probs = [item["probs"] for answer in answers for item in answer["data"]]
        if task.asks_each:
            probs = [[p, 1 - p] for row in probs for p in row]
        return Answers(
            chosen=[row.index(max(row)) for row in probs],
            probs=probs,
            prompt_tokens=_prompt_tokens(answers),
            seconds=seconds,
        )

    def decode(self, questions: Sequence[Question]) -> Answers:
        """Greedy decoding, to the end of the line."""

        def body(piece: Sequence[Question]) -> dict[str, Any]:
            prompts = [question.prompt for question in piece]
            return {"prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": 0, "stop": ["\n"]}

        started_s = time.monotonic()
        answers = self._post("/v1/completions", body, questions)
        seconds = time.monotonic() - started_s
        texts = [choice["text"] for answer in answers for choice in answer["choices"]]
        pairs = zip(texts, questions, strict=True)
        return Answers(
            chosen=[parse(text, question.labels) for text, question in pairs],
            prompt_tokens=_prompt_tokens(answers),
            seconds=seconds,
        )

    def _post(
        self, path: str, body: Callable[[Any], dict[str, Any]], items: Sequence[Any]
    ) -> list[dict[str, Any]]:
        pieces = [
            items[at : at + ROWS_PER_REQUEST] for at in range(0, len(items), ROWS_PER_REQUEST)
        ]

        def post(piece: Sequence[Any]) -> dict[str, Any]:
            answer = self._client.post(path, json={"model": self._model, **body(piece)})
            if answer.status_code != 200:
                raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
            return dict(answer.json())

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            return list(threads.map(post, pieces))


def parse(text: str, labels: Sequence[str]) -> int | None:
    """The label with which `text` begins, the longest of those that fit; None: none does."""
    said = text.strip().casefold()
    fitting = [
        index
        for index, label in enumerate(labels)
        if re.match(re.escape(label.casefold()) + r"(?!\w)", said)
    ]
    return max(fitting, key=lambda index: len(labels[index]), default=None)


def _prompt_tokens(answers: Sequence[dict[str, Any]]) -> int:
    return sum(answer["usage"]["prompt_tokens"] for answer in answers)
