"""The driver of a bulk job: lost routers, multi-label rows, fatal errors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.classification.classify import DEFAULT_TEMPLATE, ClassifyTask, classify_row
from cluster.fleet.model_folder import resolve_model_folder
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.rank_set import RoutingConfig
from cluster.serving.ingress_app import rank_clients
from cluster.tools.bulk.answering import RowClassifier
from cluster.tools.bulk.driver import RouterLostError
from cluster.tools.bulk.output import Output
from cluster.tools.bulk.records import InputRecord, RowAnswer, RowOutcome, RowRejection, RowRequest
from contracts.config import BUNDLED
from contracts.errors import ConfigError, JobError, NotReadyError, PeerDeadError, TandemError
from contracts.messages import Scored, Submit
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import tokenize_row
from tests.support.async_tests import run_async
from tests.support.attention_ranks import started
from tests.support.bulk_support import (
    JOB,
    EchoRouter,
    bulk_job,
    json_lines,
    parts,
    rows_of,
    run_job,
)
from tests.support.group_harness import ThreadGroup, group_config


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
                Output(tmp_path, JOB, resume=True)
            return await super().answer(rows)

    run_job(tmp_path, texts(3), Second())
    assert len(parts(tmp_path)) == 3


LABELS = ("negative", "positive")
TASK = ClassifyTask(labels=LABELS, template="{prefix}Review: {text}\nSentiment:")
SEVERAL_TOKENS = ClassifyTask(labels=("not at all good", "good"), template="Review: {text}\nIt is:")
ROWS = [
    RowRequest("", "A wonderful film."),
    RowRequest("Once more. ", "Dull, dull."),
    RowRequest("", "Fine {x}"),
]


class ReportingScorer:
    """Scorer that follows a script, one item per call, and then answers."""

    def __init__(self, *errors: TandemError) -> None:
        self.errors = list(errors)
        self.submits: list[Submit] = []

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        self.submits.append(submit)
        if self.errors:
            raise self.errors.pop(0)
        assert submit.candidates is not None
        usage = Usage(prompt_tokens=len(submit.token_ids), cached_tokens=1)
        same = [-1.0] * len(submit.candidates)
        return Scored(0, usage, candidate_logits=same, candidate_logprobs=same)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model_folder(BUNDLED))


@pytest.fixture(scope="module")
def group() -> Iterator[ThreadGroup]:
    with ThreadGroup(resolve_model_folder(BUNDLED), group_config()) as running:
        yield running


def answer(
    scorer: ReportingScorer,
    tokenizer: Tokenizer,
    rows: list[RowRequest],
    max_context_tokens: int = 2048,
    **fields: Any,
) -> list[RowOutcome]:
    job = bulk_job(Path("out"), **{"labels": LABELS, "template": TASK.template, **fields})
    return asyncio.run(RowClassifier(scorer, tokenizer, job, max_context_tokens).answer(rows))


@pytest.mark.parametrize("task", [TASK, SEVERAL_TOKENS], ids=["one token", "several tokens"])
@run_async
async def test_answers_equal_classify_endpoint(
    group: ThreadGroup, tokenizer: Tokenizer, task: ClassifyTask
) -> None:
    worker = group.attention[0].ready
    clients = rank_clients({worker.name: worker.client_address}, group.token)
    placer = LeastWorkPlacer(clients, RoutingConfig())
    async with started(placer) as backend:
        job = bulk_job(Path("out"), labels=task.labels, template=task.template)
        answers = await RowClassifier(backend, tokenizer, job, 2048).answer(ROWS)
        for row, got in zip(ROWS, answers, strict=True):
            one = ClassifyTask(labels=task.labels, template=task.template, prefix=row.prefix)
            alone = await classify_row(backend, one, tokenize_row(tokenizer, one, row.text))
            assert isinstance(got, RowAnswer)
            assert got.probs == pytest.approx(alone.probs, abs=1e-5)
            assert got.prompt_tokens == alone.usage.prompt_tokens


def test_unanswerable_row_is_rejected_alone(tokenizer: Tokenizer) -> None:
    rows = [RowRequest("", "short"), RowRequest("", "long " * 30), RowRequest("", "short too")]
    first, second, third = answer(ReportingScorer(), tokenizer, rows, 20, template=DEFAULT_TEMPLATE)
    assert isinstance(first, RowAnswer)
    assert isinstance(third, RowAnswer)
    assert isinstance(second, RowRejection)
    assert "the model's context holds 20" in second.reason


def test_row_waits_for_lost_worker(tokenizer: Tokenizer) -> None:
    scorer = ReportingScorer(PeerDeadError("gone", "prefill-0"), NotReadyError("none is there"))
    (got,) = answer(scorer, tokenizer, [RowRequest("", "x")])
    assert isinstance(got, RowAnswer)
    assert len(scorer.submits) == 3


def test_row_that_kills_workers_is_rejected(tokenizer: Tokenizer) -> None:
    lost = [PeerDeadError("prefill-0 is gone", "prefill-0")] * 100
    (got,) = answer(ReportingScorer(*lost), tokenizer, [RowRequest("", "x")])
    assert got == RowRejection("prefill-0 is gone [tried 3 times]")


def test_unavailable_timeout_ends_the_job(tokenizer: Tokenizer) -> None:
    gone = [NotReadyError("no worker is there")] * 1000
    with pytest.raises(NotReadyError, match="no worker is there"):
        answer(ReportingScorer(*gone), tokenizer, [RowRequest("", "x")], unavailable_s=0.2)
