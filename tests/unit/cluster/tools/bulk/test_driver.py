"""The driver of a bulk job: lost routers, multi-label rows, fatal errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.classification.classify import ClassifyTask
from cluster.tools.bulk.classifier import RowRequest
from cluster.tools.bulk.driver import RouterLostError
from cluster.tools.bulk.output import Output
from cluster.tools.bulk.records import InputRecord, RowAnswer, RowOutcome
from contracts.errors import ConfigError, JobError
from tests.support.bulk_support import JOB, EchoRouter, json_lines, parts, rows_of, run_job


def texts(count: int) -> list[InputRecord]:
    return rows_of([f"text {number}" for number in range(count)])


def test_rows_of_a_lost_router_are_sent_again_and_counted(tmp_path: Path) -> None:
    class Unsteady(EchoRouter):
        losses = 0

        async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
            answers = await super().answer(rows)
            if len(self.requested) % 5 == 0:
                self.losses += len(rows)
                raise RouterLostError("gone")
            return answers

    router = Unsteady()
    run_job(tmp_path, texts(40), router)
    assert [row["id"] for row in parts(tmp_path)] == [f"id-{number}" for number in range(40)]
    assert router.losses > 0
    sent_again = sum(line["rows_sent_again"] for line in json_lines(tmp_path / "ledger.jsonl"))
    assert sent_again == router.losses


def test_best_label_is_answer_with_seven_digits(tmp_path: Path) -> None:
    class Fixed(EchoRouter):
        async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
            return [RowAnswer([1 / 3, 2 / 3], 5, 2) for _ in rows]

    run_job(tmp_path, texts(1), Fixed())
    assert parts(tmp_path) == [
        {"id": "id-0", "label": "yes", "probs": [0.3333333, 0.6666667], "prompt_tokens": 5}
    ]


def test_multi_label_lists_applicable_labels(tmp_path: Path) -> None:
    class Fixed(EchoRouter):
        async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
            return [RowAnswer([0.1, 0.9, 0.5], 5, 2) for _ in rows]

    task = ClassifyTask(labels=("a", "b", "c"), template="{text} Is it {label}?")
    run_job(tmp_path, texts(1), Fixed(), task=task, multi_label=True)
    assert parts(tmp_path)[0]["label"] == ["b", "c"]


def test_router_error_ends_run_and_keeps_finished_rows(tmp_path: Path) -> None:
    class Broken(EchoRouter):
        async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
            if len(self.requested) > 20:
                raise JobError("no worker answers")
            return await super().answer(rows)

    with pytest.raises(JobError, match="no worker answers"):
        run_job(tmp_path, texts(40), Broken())
    router = EchoRouter()
    run_job(tmp_path, texts(40), router)
    assert len(parts(tmp_path)) == 40
    assert len(router.requested) < 25


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    router, folder = EchoRouter(), tmp_path / "out"

    def remove(requested: int) -> None:
        if requested == 16:
            folder.rename(tmp_path / "elsewhere")

    router.on_rows = remove
    with pytest.raises(JobError, match="cannot be written: No such file or directory"):
        run_job(folder, texts(40), router)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    class Second(EchoRouter):
        async def answer(self, rows: list[RowRequest]) -> list[RowOutcome]:
            with pytest.raises(ConfigError, match="another run is at work in this folder"):
                Output.open(tmp_path, JOB, resume=True)
            return await super().answer(rows)

    run_job(tmp_path, texts(3), Second())
    assert len(parts(tmp_path)) == 3
