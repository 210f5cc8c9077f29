"""Rows of the classification sets as token ids, for the speed of prefill-only work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.bundled.tasks import raw_rows

_FRONT, _FRONTS = 100, 3900  # ids of plain characters and words in both tokenizers
Encode = Callable[[list[str]], list[list[int]]]


class Pick(NamedTuple):
    """Which rows of a set: whole `groups` of one prefix, those of middle length or the shortest;
    or, of a set whose rows have none, `rows` at random. template: around prefix and text."""

    file: str
    template: str
    groups: int = 0
    rows: int = 0
    shortest: bool = False


PICKS = {
    "mmlu": Pick("mmlu.jsonl.gz", "{}", groups=2),
    "quality": Pick("quality.jsonl.gz", "{}", groups=2, shortest=True),
    "moral_stories": Pick("moral_stories.jsonl", "{}\nJudgement:", groups=200),
    "rt_polarity": Pick("rt_polarity.jsonl.gz", "{}\nSentiment:", rows=400),
    "ag_news": Pick("ag_news.jsonl.gz", "{}\nTopic:", rows=200),
}


class Rows(NamedTuple):
    """token_ids in the order of their texts, so that rows of one prefix follow each other, as in a
    bulk job. candidates: ids whose logits are wanted, of all rows."""

    token_ids: list[list[int]]
    candidates: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def sample(self, tokens: int) -> Rows:
        """Rows from all over, of at least `tokens` together: some to try things with."""
        step = max(1, self.tokens // tokens)
        return Rows(self.token_ids[::step], self.candidates)

    def behind(self, number: int, *, apart: bool) -> Rows:
        """With a token in front of each row, another one for each number: other rows for any cache.
        apart: and another one for each row, so that no two begin alike."""
        fronts = (_FRONT + (number + place * apart) % _FRONTS for place in itertools.count())
        pairs = zip(fronts, self.token_ids, strict=False)
        return Rows([[front, *ids] for front, ids in pairs], self.candidates)


def read(pick: Pick, data: Path, encode: Encode, context: int, seed: int = 0) -> Rows | None:
    """Nothing is cut: groups with a row beyond the context are left out; None if all are."""
    raws = list(raw_rows(data / "classification" / pick.file))
    if pick.rows:
        picked = random.Random(seed).sample(raws, min(pick.rows, len(raws)))
        groups = [_encoded([row], pick, encode) for row in picked]
    else:
        by_prefix = itertools.groupby(sorted(raws, key=_prefix), key=_prefix)
        groups = [_encoded(list(rows), pick, encode) for _, rows in by_prefix]
    fitting = [group for group in groups if max(map(len, group)) < context]  # one comes in front
    if not fitting:
        return None
    if pick.groups:
        fitting = _chosen(sorted(fitting, key=lambda group: max(map(len, group))), pick)
    candidates = [ids[-1] for ids in encode([f"x {label}" for label in raws[0]["labels"]])]
    return Rows([ids for group in fitting for ids in group], candidates)


def _prefix(row: dict[str, Any]) -> str:
    return str(row["prefix"])


def _encoded(rows: Sequence[dict[str, Any]], pick: Pick, encode: Encode) -> list[list[int]]:
    texts = sorted((row.get("prefix") or "") + row["text"] for row in rows)
    return encode([pick.template.format(text) for text in texts])


def _chosen(groups: list[list[list[int]]], pick: Pick) -> list[list[list[int]]]:
    if pick.shortest:
        return groups[: pick.groups]
    first = max(0, (len(groups) - pick.groups) // 2)
    return groups[first : first + pick.groups]
