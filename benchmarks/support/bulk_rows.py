"""The rows of a bulk job: made, counted as they are answered, and held against the answers."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cluster.tools.bulk.output import journal_name

_WORDS = ("film", "good", "bad", "long", "short", "great", "boring", "and", "but", "never", "like")


def made_up(rows: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(rows):
        yield " ".join(rng.choices(_WORDS, k=rng.randint(3, 9)))


def texts_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]


def write_rows(path: Path, rows: int, seed: int, data: Path | None) -> None:
    """`rows` rows with the ids 0, 1, …; those of `data` again and again if they are too few."""
    texts = list(texts_of(data)) if data is not None else []
    source = (texts[n % len(texts)] for n in range(rows)) if texts else made_up(rows, seed)
    with path.open("wb") as file:
        for number, text in enumerate(source):
            file.write(msgspec.json.encode({"id": number, "text": text}) + b"\n")


def _rows_of(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b'["came"')
    except FileNotFoundError:  # committed meanwhile
        return 0


class RowsDone:
    """Rows answered so far, from the output folder: the ledger's and the journals' lines."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def count(self) -> int:
        journals = {path.name: _rows_of(path) for path in self._output.glob("journal-*.jsonl")}
        ledger = self._output / "ledger.jsonl"
        done = 0
        for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
            entry = json.loads(line)
            done += entry["rows_ok"] + entry["rows_rejected"]
            journals.pop(journal_name(entry["window"]), None)  # there for a moment longer
        return done + sum(journals.values())


def check(output: Path, rows: int) -> dict[str, Any]:
    """The summary. Raises RuntimeError unless every row is there once."""
    seen: Counter[int] = Counter()
    for part in sorted(output.glob("part-*.jsonl")):
        with part.open("rb") as file:
            seen.update(json.loads(line)["id"] for line in file)
    missing, repeated = rows - len(seen), sum(seen.values()) - len(seen)
    if missing or repeated or set(seen) != set(range(rows)):
        raise RuntimeError(f"{missing} rows are missing, {repeated} are there twice")
    left = [path.name for path in output.glob("journal-*")]
    if left or (output / "rejected.jsonl").stat().st_size:
        raise RuntimeError(f"left over: {left}, or rejected rows")
    summary: dict[str, Any] = json.loads((output / "summary.json").read_bytes())
    return summary
