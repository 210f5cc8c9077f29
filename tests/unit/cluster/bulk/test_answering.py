"""Chunks of rows: the answers of /v1/classify, each row's own error, patience with workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.bulk.answering import Answering, Asked, BulkTask
from cluster.bulk.rows import Answer, Answered, Refused
from cluster.classification.classify import ClassifyTask, classify_row, tokenize_row
from cluster.classification.multilabel import YES, questions
from cluster.files.model_folder import resolve_model_folder
from cluster.routing.admission import Admission
from cluster.routing.least_work import LeastWork
from cluster.routing.placer import RoutingConfig
from cluster.serving.wiring import rank_clients
from contracts.config import BUNDLED
from contracts.errors import NotReadyError, PeerDeadError, RankError, TandemError
from contracts.messages import Scored, Submit
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer
from tests.support.group_harness import ThreadGroup, group_config

LABELS = ("negative", "positive")
TASK = ClassifyTask(labels=LABELS, template="{prefix}Review: {text}\nSentiment:")
SEVERAL_TOKENS = ClassifyTask(labels=("not at all good", "good"), template="Review: {text}\nIt is:")
QUESTION = ClassifyTask(labels=LABELS, template="Review: {text}\nIs it {label}?")
ROWS = [Asked("", "A wonderful film."), Asked("Once more. ", "Dull, dull."), Asked("", "Fine {x}")]


class Told:
    """A scorer that does what it is told, one item per call, and then answers."""

    def __init__(self, *errors: TandemError) -> None:
        self.errors = list(errors)
        self.submits: list[Submit] = []

    async def score(self, submit: Submit, *, patient: bool = False) -> Scored:
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


def answer(scorer: Told, tokenizer: Tokenizer, rows: list[Asked], **fields: Any) -> list[Answer]:
    bulk = BulkTask(**{"task": TASK, **fields})

    async def run() -> list[Answer]:
        return await Answering(scorer, tokenizer, bulk).answer(rows)

    return asyncio.run(run())


@pytest.mark.parametrize("task", [TASK, SEVERAL_TOKENS], ids=["one token", "several tokens"])
def test_answers_are_those_of_classify(
    group: ThreadGroup, tokenizer: Tokenizer, task: ClassifyTask
) -> None:
    async def run() -> None:
        worker = group.attention[0].ready
        clients = rank_clients({worker.name: worker.client_address}, group.token)
        admission = Admission(LeastWork(clients, RoutingConfig()))
        admission.start()
        async with asyncio.timeout(60):
            await admission.wait_ready()
            answers = await Answering(admission, tokenizer, BulkTask(task=task)).answer(ROWS)
            for row, got in zip(ROWS, answers, strict=True):
                one = ClassifyTask(labels=task.labels, template=task.template, prefix=row.prefix)
                alone = await classify_row(admission, one, tokenize_row(tokenizer, one, row.text))
                assert isinstance(got, Answered)
                assert got.probs == pytest.approx(alone.probs, abs=1e-5)
                assert got.prompt_tokens == alone.usage.prompt_tokens
        await admission.close()

    asyncio.run(run())


def test_a_row_that_cannot_be_answered_is_refused_alone(tokenizer: Tokenizer) -> None:
    task = ClassifyTask(labels=LABELS, max_context_tokens=20)
    rows = [Asked("", "short"), Asked("", "long " * 30), Asked("", "short too")]
    first, second, third = answer(Told(), tokenizer, rows, task=task)
    assert isinstance(first, Answered)
    assert isinstance(third, Answered)
    assert isinstance(second, Refused)
    assert "the model's context holds 20" in second.reason


def test_multi_label_asks_one_question_per_label(tokenizer: Tokenizer) -> None:
    scorer = Told()
    (got,) = answer(scorer, tokenizer, [Asked("", "x")], task=QUESTION, multi_label=True)
    assert got == Answered([0.5, 0.5], sum(len(s.token_ids) for s in scorer.submits), 2)
    asked = [tokenizer.decode(submit.token_ids) for submit in scorer.submits]
    assert asked == ["Review: x\nIs it negative?", "Review: x\nIs it positive?"]
    assert len(questions(QUESTION)) == 2
    assert YES == 0


def test_a_lost_worker_is_waited_for(tokenizer: Tokenizer) -> None:
    scorer = Told(PeerDeadError("gone", "prefill-0"), NotReadyError("none is there"))
    (got,) = answer(scorer, tokenizer, [Asked("", "x")])
    assert isinstance(got, Answered)
    assert len(scorer.submits) == 3


def test_a_worker_that_refuses_a_row_makes_it_a_rejected_one(tokenizer: Tokenizer) -> None:
    refusal = RankError("prefill-0: the prompt has 9 tokens too many", "too_long", 413)
    (got,) = answer(Told(refusal), tokenizer, [Asked("", "x")])
    assert got == Refused("prefill-0: the prompt has 9 tokens too many")


def test_a_row_that_ends_worker_after_worker_is_given_up(tokenizer: Tokenizer) -> None:
    lost = [PeerDeadError("prefill-0 is gone", "prefill-0")] * 100
    (got,) = answer(Told(*lost), tokenizer, [Asked("", "x")])
    assert got == Refused("prefill-0 is gone [tried 3 times]")


def test_patience_ends_when_nothing_is_answered(tokenizer: Tokenizer) -> None:
    gone = [NotReadyError("no worker is there")] * 1000
    with pytest.raises(NotReadyError, match="no worker is there"):
        answer(Told(*gone), tokenizer, [Asked("", "x")], unavailable_s=0.2)
