"""Bulk jobs in one process: a router whose answers follow from the rows, and crashes on demand."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.bulk.answering import Asked
from cluster.bulk.driver import Driver, DriverSettings
from cluster.bulk.job import BulkJob
from cluster.bulk.output import Output
from cluster.bulk.progress import Tally
from cluster.bulk.rows import Answer, Answered, InputRow, Record, Refused
from cluster.bulk.windows import WindowLimits, windows_of
from cluster.classification.classify import ClassifyTask

LABELS = ("no", "yes")
TASK = ClassifyTask(labels=LABELS)
JOB = {"labels": LABELS}


class Killed(BaseException):
    """As `kill -9`: nothing that catches errors sees it."""


class EchoRouter:
    """Answers from a digest of the row; refuses texts that begin with "refuse"."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.on_rows: Callable[[int], None] = lambda count: None

    async def answer(self, rows: list[Asked]) -> list[Answer]:
        await asyncio.sleep(0)
        self.asked.extend(rows)
        self.on_rows(len(self.asked))
        return [echo(row) for row in rows]


def echo(row: Asked) -> Answer:
    if row.text.startswith("refuse"):
        return Refused("told so")
    digest = hashlib.blake2b(f"{row.prefix}|{row.text}".encode(), digest_size=2).digest()
    yes = int.from_bytes(digest, "little") / 65536
    return Answered([1 - yes, yes], len(row.text), len(row.prefix))


def rows_of(texts: Iterable[str]) -> list[Record]:
    return [InputRow(f"id-{number}", f"in:{number}", "", text) for number, text in enumerate(texts)]


def run_job(
    folder: Path,
    records: Iterable[Record],
    router: Any,
    *,
    window_rows: int = 7,
    in_flight_rows: int = 4,
    task: ClassifyTask = TASK,
    multi_label: bool = False,
) -> Output:
    """What is left of the job in `folder`, to its end."""
    output = Output.open(folder, JOB, resume=True)
    settings = DriverSettings(task=task, multi_label=multi_label, in_flight_rows=in_flight_rows)
    windows = windows_of(iter(records), WindowLimits(rows=window_rows), ids=True)
    try:
        asyncio.run(Driver(output, router, settings, Tally()).run(windows))
    finally:
        output.close()
    return output


def parts(folder: Path) -> list[dict[str, Any]]:
    """All output rows, in the order of the parts."""
    return [row for path in sorted(folder.glob("part-*.jsonl")) for row in json_lines(path)]


def rejected(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / "rejected.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def final_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != "ledger.jsonl":
            yield path.name, path.read_bytes()


def bulk_job(output: Path, **fields: Any) -> BulkJob:
    return BulkJob(**{"inputs": ("rows.jsonl",), "output": output, "labels": LABELS, **fields})
