"""Chunks of rows: the answers of /v1/classify, errors per row, retries after lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.classification.classify import (
    YES,
    ClassifyTask,
    classify_row,
    label_tasks,
)
from cluster.fleet.model_folder import resolve_model_folder
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_set import RoutingConfig
from cluster.serving.ingress_app import rank_clients
from cluster.tools.bulk.classifier import BulkTask, RowClassifier, RowRequest
from cluster.tools.bulk.records import RowAnswer, RowOutcome, RowRejection
from contracts.config import BUNDLED
from contracts.errors import NotReadyError, PeerDeadError, RankError, TandemError
from contracts.messages import Scored, Submit
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import tokenize_row
from tests.support.group_harness import ThreadGroup, group_config

LABELS = ("negative", "positive")
TASK = ClassifyTask(labels=LABELS, template="{prefix}Review: {text}\nSentiment:")
SEVERAL_TOKENS = ClassifyTask(labels=("not at all good", "good"), template="Review: {text}\nIt is:")
QUESTION = ClassifyTask(labels=LABELS, template="Review: {text}\nIs it {label}?")
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
    scorer: ReportingScorer, tokenizer: Tokenizer, rows: list[RowRequest], **fields: Any
) -> list[RowOutcome]:
    bulk = BulkTask(**{"task": TASK, **fields})

    async def run() -> list[RowOutcome]:
        return await RowClassifier(scorer, tokenizer, bulk).answer(rows)

    return asyncio.run(run())


@pytest.mark.parametrize("task", [TASK, SEVERAL_TOKENS], ids=["one token", "several tokens"])
def test_answers_equal_classify_endpoint(
    group: ThreadGroup, tokenizer: Tokenizer, task: ClassifyTask
) -> None:
    async def run() -> None:
        worker = group.attention[0].ready
        clients = rank_clients({worker.name: worker.client_address}, group.token)
        backend = PipelineBackend(LeastWorkPlacer(clients, RoutingConfig()))
        backend.start()
        async with asyncio.timeout(60):
            await backend.wait_ready()
            answers = await RowClassifier(backend, tokenizer, BulkTask(task=task)).answer(ROWS)
            for row, got in zip(ROWS, answers, strict=True):
                one = ClassifyTask(labels=task.labels, template=task.template, prefix=row.prefix)
                alone = await classify_row(backend, one, tokenize_row(tokenizer, one, row.text))
                assert isinstance(got, RowAnswer)
                assert got.probs == pytest.approx(alone.probs, abs=1e-5)
                assert got.prompt_tokens == alone.usage.prompt_tokens
        await backend.close()

    asyncio.run(run())


def test_unanswerable_row_is_rejected_alone(tokenizer: Tokenizer) -> None:
    task = ClassifyTask(labels=LABELS, max_context_tokens=20)
    rows = [RowRequest("", "short"), RowRequest("", "long " * 30), RowRequest("", "short too")]
    first, second, third = answer(ReportingScorer(), tokenizer, rows, task=task)
    assert isinstance(first, RowAnswer)
    assert isinstance(third, RowAnswer)
    assert isinstance(second, RowRejection)
    assert "the model's context holds 20" in second.reason


def test_multi_label_has_one_pass_per_label(tokenizer: Tokenizer) -> None:
    scorer = ReportingScorer()
    (got,) = answer(scorer, tokenizer, [RowRequest("", "x")], task=QUESTION, multi_label=True)
    assert got == RowAnswer([0.5, 0.5], sum(len(s.token_ids) for s in scorer.submits), 2)
    requested = [tokenizer.decode(submit.token_ids) for submit in scorer.submits]
    assert requested == ["Review: x\nIs it negative?", "Review: x\nIs it positive?"]
    assert len(label_tasks(QUESTION)) == 2
    assert YES == 0


def test_row_waits_for_lost_worker(tokenizer: Tokenizer) -> None:
    scorer = ReportingScorer(PeerDeadError("gone", "prefill-0"), NotReadyError("none is there"))
    (got,) = answer(scorer, tokenizer, [RowRequest("", "x")])
    assert isinstance(got, RowAnswer)
    assert len(scorer.submits) == 3


def test_row_refused_by_worker_is_rejected(tokenizer: Tokenizer) -> None:
    refusal = RankError("prefill-0: the prompt has 9 tokens too many", "too_long", 413)
    (got,) = answer(ReportingScorer(refusal), tokenizer, [RowRequest("", "x")])
    assert got == RowRejection("prefill-0: the prompt has 9 tokens too many")


def test_row_that_kills_workers_is_rejected(tokenizer: Tokenizer) -> None:
    lost = [PeerDeadError("prefill-0 is gone", "prefill-0")] * 100
    (got,) = answer(ReportingScorer(*lost), tokenizer, [RowRequest("", "x")])
    assert got == RowRejection("prefill-0 is gone [tried 3 times]")


def test_unavailable_timeout_ends_the_job(tokenizer: Tokenizer) -> None:
    gone = [NotReadyError("no worker is there")] * 1000
    with pytest.raises(NotReadyError, match="no worker is there"):
        answer(ReportingScorer(*gone), tokenizer, [RowRequest("", "x")], unavailable_s=0.2)
