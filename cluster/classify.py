"""Zero-shot classification as prefill-only work: which label is the likeliest continuation?

A row's prompt is the template with its text (and the shared prefix) filled in. Each label becomes
the tokens that continue the prompt (`Tokenizer.continuations`), with a space in front unless the
prompt ends with white space or the label begins with it.

- Every label is one token, and all differ: one pass per row; the probabilities are the softmax over
  these candidates' logits at the last prompt position.
- Otherwise: one pass per label over prompt + label; the probabilities are the softmax over the
  labels' summed log-probabilities. The sum is not divided by the length: it is the probability that
  the model writes the label; so where one label begins with another one, the shorter wins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from cluster.bounded import map_bounded
from contracts.errors import RankError, RequestError, TooLongError
from contracts.messages import Scored, Submit
from contracts.requests import Priority, Usage
from models.tokenizer import Tokenizer

DEFAULT_TEMPLATE = "{prefix}{text}"
_PLACEHOLDER = re.compile(r"\{(text|prefix|label)\}")


class Scorer(Protocol):
    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
        """The answer of a prefill-only job. patient: wait for room rather than be refused."""


class ClassifyTask(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows share. asked: what {label} stands for (`multilabel.py`); None: for itself."""

    labels: tuple[str, ...]
    prefix: str = ""
    template: str = DEFAULT_TEMPLATE
    priority: Priority = Priority.BE
    max_context_tokens: int = 1 << 30
    asked: str | None = None


class Row(msgspec.Struct, frozen=True):
    """prompt_ids, and per label the ids that continue it. patient: as in `Scorer.score`."""

    prompt_ids: list[int]
    label_ids: list[list[int]]
    patient: bool = False

    @property
    def has_candidates(self) -> bool:
        """Whether the labels are told apart by one distinct token each."""
        first = {ids[0] for ids in self.label_ids if len(ids) == 1}
        return len(first) == len(self.label_ids)


class Classified(msgspec.Struct, frozen=True):
    """probs in the order of the labels; usage counts all passes that the row took."""

    probs: list[float]
    usage: Usage

    @property
    def best(self) -> int:
        return max(range(len(self.probs)), key=self.probs.__getitem__)


def check_task(task: ClassifyTask) -> None:
    """Raises RequestError for labels or a template that cannot be used."""
    if not task.labels:
        raise RequestError("labels: at least one is needed", "labels")
    for index, label in enumerate(task.labels):
        if not label.strip():
            raise RequestError(f"labels[{index}] is empty", "labels")
    if len(set(task.labels)) != len(task.labels):
        repeated = next(label for label in task.labels if task.labels.count(label) > 1)
        raise RequestError(f"labels: {repeated!r} occurs more than once", "labels")
    if "{text}" not in task.template:
        raise RequestError("template: {text} does not occur in it", "template")
    if task.prefix and "{prefix}" not in task.template:
        raise RequestError("template: a prefix is given, but {prefix} does not occur", "template")


def fill(task: ClassifyTask, text: str) -> str:
    """The row's prompt. Plain replacement, once: braces in `text` are just text."""
    values = {"text": text, "prefix": task.prefix}
    if task.asked is not None:
        values["label"] = task.asked
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), task.template)


async def tokenize_row(tokenizer: Tokenizer, task: ClassifyTask, text: str) -> Row:
    """Raises RequestError for an empty prompt, TooLongError beyond the context."""
    prompt = fill(task, text)
    return _checked_row(task, *await tokenizer.continuations_async(prompt, _joined(prompt, task)))


def tokenize_rows(
    tokenizer: Tokenizer, asked: Sequence[tuple[str, ClassifyTask]]
) -> list[Row | RequestError]:
    """`tokenize_row` of many texts at once; a row's error in its place."""
    prompts = [fill(task, text) for text, task in asked]
    pairs = [
        (prompt, _joined(prompt, task)) for prompt, (_, task) in zip(prompts, asked, strict=True)
    ]
    found: list[Row | RequestError] = []
    for (_, task), ids in zip(asked, tokenizer.continuations_many(pairs), strict=True):
        try:
            found.append(_checked_row(task, *ids))
        except RequestError as error:
            found.append(error)
    return found


def _checked_row(task: ClassifyTask, prompt_ids: list[int], label_ids: list[list[int]]) -> Row:
    if not prompt_ids:
        raise RequestError("input: the prompt is empty", "input")
    for label, ids in zip(task.labels, label_ids, strict=True):
        if not ids:
            raise RequestError(f"labels: {label!r} adds no token of its own", "labels")
    longest = len(prompt_ids) + max(map(len, label_ids))
    if longest > task.max_context_tokens:
        raise TooLongError(
            f"input: prompt and label have {longest} tokens, the model's context holds"
            f" {task.max_context_tokens}",
            "input",
        )
    return Row(prompt_ids, label_ids)


def _joined(prompt: str, task: ClassifyTask) -> list[str]:
    """The labels as they follow the prompt."""
    spaced = prompt[-1:].isspace()
    return [label if spaced or label[:1].isspace() else f" {label}" for label in task.labels]


async def classify_row(scorer: Scorer, task: ClassifyTask, row: Row) -> Classified:
    """The row's probabilities; raises what `scorer` raises."""
    if row.has_candidates:
        return await _by_candidates(scorer, task, row)
    passes = [
        Submit(
            request_id=0,
            token_ids=row.prompt_ids + ids,
            sampling=None,
            priority=task.priority,
            score_from=len(row.prompt_ids),
        )
        for ids in row.label_ids
    ]

    async def score(numbered: tuple[int, Submit]) -> Scored:
        label, submit = numbered
        return await scorer.score(submit, patient=row.patient or label > 0)

    scores = await map_bounded(score, enumerate(passes), limit=len(passes))
    totals = [
        math.fsum(checked_scores(scored.token_logprobs, len(ids)))
        for scored, ids in zip(scores, row.label_ids, strict=True)
    ]
    return Classified(softmax(totals), add_usage([scored.usage for scored in scores]))


async def _by_candidates(scorer: Scorer, task: ClassifyTask, row: Row) -> Classified:
    scored = await scorer.score(
        Submit(
            request_id=0,
            token_ids=row.prompt_ids,
            sampling=None,
            priority=task.priority,
            candidates=[ids[0] for ids in row.label_ids],
        ),
        patient=row.patient,
    )
    logits = checked_scores(scored.candidate_logits, len(row.label_ids))
    return Classified(softmax(logits), scored.usage)


def checked_scores(values: Sequence[float] | None, expected: int) -> Sequence[float]:
    """`values`, if they are as many as asked for and finite."""
    if values is None or len(values) != expected or not all(map(math.isfinite, values)):
        got = "none" if values is None else str(list(values)[:8])
        raise RankError(
            f"expected {expected} finite scores from the rank, got {got}", "bad_score", 500
        )
    return values


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def add_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
