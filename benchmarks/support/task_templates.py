"""The classification sets as prompts: a template and labels each, and the reading of their rows.

A prompt is the template with the row's `prefix` and `text`; the answer is one of `labels` after it,
with a space in between. Tasks that the bundled checkpoint was trained on are those of
`training.bundled.tasks`, in their own words.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec

from cluster.classification.classify import ClassifyTask, render_prompt
from training.bundled import tasks as bundled
from training.bundled.tasks import raw_rows

# What the bundled checkpoint has seen: the task; its template alone, with rows of another set; none
# of it, so that its accuracy is near chance, and only the agreement of modes says something.
Familiar = Literal["trained", "template", "no"]


class Posed(msgspec.Struct, frozen=True, kw_only=True):
    """One data set as prompts. labels: None takes the file's own. asks_each: multi-selection, with
    the label in the template and the answer yes or no. share: of the rows asked for, where one of
    them takes many passes."""

    name: str
    file: str
    template: str = "{prefix}{text}"
    labels: tuple[str, ...] | None = None
    familiar: Familiar = "no"
    is_multi_label: bool = False
    share: float = 1.0


class Row(msgspec.Struct, frozen=True):
    """gold: index of the right label."""

    prefix: str
    text: str
    labels: tuple[str, ...]
    gold: int


def _bundled(task: bundled.LabelTask) -> Posed:
    labels = tuple(label.strip() for label in task.labels)
    return Posed(
        name=task.name, file=task.file, template=task.template, labels=labels, familiar="trained"
    )


_SENTIMENT = "Review: {text}\nSentiment:"
_INTENTS = tuple(label.strip().replace("_", " ") for label in bundled.BANKING_LABELS)

TASKS: tuple[Posed, ...] = (
    *map(_bundled, bundled.TASKS),
    Posed(name="imdb", file="imdb.jsonl", template=_SENTIMENT, familiar="template"),
    Posed(
        name="rt_polarity", file="rt_polarity.jsonl.gz", template=_SENTIMENT, familiar="template"
    ),
    Posed(name="boolq", file="boolq.jsonl.gz"),
    Posed(name="mmlu", file="mmlu.jsonl.gz"),  # the options' symbols: A, B, C, D
    Posed(name="quality", file="quality.jsonl.gz"),
    Posed(name="ag_news", file="ag_news.jsonl.gz", template="Article: {text}\nTopic:"),
    Posed(  # labels of several tokens, which share their first ones
        name="banking77 in words",
        file="banking77.jsonl.gz",
        template="Question: {text}\nIntent:",
        labels=_INTENTS,
        share=0.1,
    ),
    Posed(
        name="arxiv in words",
        file="arxiv_abstracts.jsonl",
        template="Abstract: {text}\nField:",
    ),
    Posed(name="passage retrieval", file="longbench_passage_retrieval_zh.jsonl.gz"),
    Posed(
        name="goemotions, each",
        file="goemotions.jsonl.gz",
        template="Post: {text}\nDoes it show {label}?",
        is_multi_label=True,
        share=0.1,
    ),
)


def read_rows(task: Posed, data: Path, count: int, seed: int = 0) -> list[Row]:
    """`count` rows of the test split, drawn at random, or all if there are fewer."""
    rows = []
    for raw in raw_rows(data / "classification" / task.file):
        if raw["split"] != "test":
            continue
        labels = task.labels or tuple(raw["labels"])
        rows.append(Row(raw.get("prefix") or "", raw["text"].strip(), labels, raw["label"]))
    return random.Random(seed).sample(rows, min(count, len(rows)))


def prompt_of(task: Posed, row: Row, label: str | None = None) -> str:
    """Filled in as the server does it. label: the one that is asked for, where each is."""
    target = ClassifyTask(
        labels=row.labels, prefix=row.prefix, template=task.template, target=label
    )
    return render_prompt(target, row.text)
