"""Bulk jobs in one process: a router with deterministic answers, and simulated crashes."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.tools.bulk.driver import Driver
from cluster.tools.bulk.job import BulkJob
from cluster.tools.bulk.output import Output
from cluster.tools.bulk.progress import RowTally
from cluster.tools.bulk.records import (
    InputRecord,
    InputRow,
    RowAnswer,
    RowOutcome,
    RowRejection,
    RowRequest,
    WindowLimits,
    split_windows,
)

LABELS = ("no", "yes")
JOB = {"labels": LABELS}


class Killed(BaseException):
    """A simulated `kill -9`: no error handler catches it."""


class EchoRouter:
    """Router that answers from a digest of the row, and refuses texts that begin with "refuse"."""

    def __init__(self) -> None:
        self.requested: list[RowRequest] = []
        self.on_rows: Callable[[int], None] = lambda count: None

    async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
        await asyncio.sleep(0)
        self.requested.extend(rows)
        self.on_rows(len(self.requested))
        return [echo(row) for row in rows]


def echo(row: RowRequest) -> RowOutcome:
    if row.text.startswith("refuse"):
        return RowRejection("told so")
    digest = hashlib.blake2b(f"{row.prefix}|{row.text}".encode(), digest_size=2).digest()
    yes = int.from_bytes(digest, "little") / 65536
    return RowAnswer([1 - yes, yes], len(row.text), len(row.prefix))


def rows_of(texts: Iterable[str]) -> list[InputRecord]:
    return [InputRow(f"id-{number}", f"in:{number}", "", text) for number, text in enumerate(texts)]


def run_job(
    folder: Path,
    records: Iterable[InputRecord],
    router: Any,
    *,
    window_rows: int = 7,
    in_flight_rows: int = 4,
    multi_label: bool = False,
) -> Output:
    """Run the rest of the job in `folder`."""
    output = Output(folder, JOB, resume=True)
    job = bulk_job(folder, multi_label=multi_label, in_flight_rows=in_flight_rows)
    windows = split_windows(iter(records), WindowLimits(rows=window_rows), ids=True)
    try:
        asyncio.run(Driver(output, router, job, RowTally()).run(windows))
    finally:
        output.close()
    return output


def parts(folder: Path) -> list[dict[str, Any]]:
    """Return all output rows in the order of the parts."""
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
