"""What the examples of README and of the pages for users ask, the bundled model answers rightly."""

import asyncio
import json
import re
from typing import Any

import pytest
import torch

from cluster.classification.classify import ClassifyTask, classify_row
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from contracts.messages import Scored, Submit
from contracts.requests import Usage
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import tokenize_row
from tests.support.documented import DOCUMENTS, ROOT
from tests.support.local_model import LocalModel

_BODY = re.compile(r"-d '(\{.*?\})'", re.DOTALL)
RIGHT = {
    "Review: It works well.": " positive",
    "Running late, order me a coffee?": "no",
    "WINNER! Claim your free 1000 pound prize, call 09061701461.": "yes",
    "Action: Jack ignores his cough as it worsens.": "immoral",
    "Action: Jack sets up a video conference with his doctor.": "moral",
}


class Local:
    """A `Scorer` over the whole model in this process."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        assert submit.candidates is not None
        assert submit.score_from is None
        last_V = self._model.forward([submit.token_ids])[0][-1].log_softmax(-1)
        logprobs = last_V[submit.candidates].tolist()
        usage = Usage(prompt_tokens=len(submit.token_ids))
        return Scored(0, usage, candidate_logprobs=logprobs)


@pytest.fixture(scope="module")
def bundled() -> tuple[LocalModel, Tokenizer]:
    folder = resolve_model_folder(BUNDLED)
    return LocalModel.load(folder, dtype="float32"), Tokenizer.load(folder)


def bodies() -> list[dict[str, Any]]:
    """The JSON that documented curl commands send."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    return [json.loads(body) for page in pages for body in _BODY.findall(page)]


def test_each_example_is_answered_as_a_person_would(bundled: tuple[LocalModel, Tokenizer]) -> None:
    """The first classification example was answered wrongly."""
    model, tokenizer = bundled
    answers: dict[str, str] = {}
    with torch.inference_mode():
        for body in bodies():
            if "prompt" in body:
                written = model.greedy(tokenizer.encode(body["prompt"]), 1)
                answers[body["prompt"].partition("\n")[0]] = tokenizer.decode(written)
            for text in body.get("input", []):
                task = ClassifyTask(
                    labels=tuple(body["labels"]),
                    prefix=body.get("prefix", ""),
                    template=body["template"],
                )
                row = tokenize_row(tokenizer, task, text)
                result = asyncio.run(classify_row(Local(model), task, row))
                answers[text] = task.labels[result.best]
    assert answers == RIGHT
