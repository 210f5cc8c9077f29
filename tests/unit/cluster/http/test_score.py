"""`/v1/score`: probabilities of given tokens after a query and each item."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.classification.classify import softmax
from tests.support.api_harness import CONTEXT_TOKENS, Api, serve_api
from tests.support.fake_rank import FakeRank, token_logprob

LABELS = [60, 61, 65]


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [])]) as api:
        yield api


def score(api: Api, **body: object) -> Any:
    return api.http.post("/v1/score", json={"label_token_ids": LABELS, **body})


def prompts(api: Api) -> list[list[int]]:
    return [api.rank.submits.get().token_ids for _ in range(api.rank.submits.qsize())]


def test_scores_are_probabilities_over_vocabulary(api: Api) -> None:
    answer = score(api, query="Is it good? ", items=["yes", "no"]).json()
    assert answer["scores"] == [[math.exp(token_logprob(label)) for label in LABELS]] * 2
    encode = api.tokenizer.encode
    assert prompts(api) == [encode("Is it good? yes"), encode("Is it good? no")]
    assert answer["usage"]["completion_tokens"] == 0


def test_apply_softmax_normalizes_among_labels(api: Api) -> None:
    answer = score(api, query="q", items="i", apply_softmax=True).json()
    assert answer["scores"] == [softmax([token_logprob(label) for label in LABELS])]
    prompts(api)


def test_item_first_places_item_before_query(api: Api) -> None:
    score(api, query="query", items=["item "], item_first=True)
    score(api, query=[70, 71], items=[[72]], item_first=True)
    score(api, query=[70, 71], items=[[72]])
    assert prompts(api) == [api.tokenizer.encode("item query"), [72, 70, 71], [70, 71, 72]]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"items": ["a"]}, 400, "query"),
        ({"query": "a"}, 400, "items"),
        ({"query": "a", "items": []}, 400, "items"),
        ({"query": "a", "items": [[1]]}, 400, "items"),
        ({"query": [70], "items": ["a"]}, 400, "items"),
        ({"query": "", "items": [""]}, 400, "items"),
        ({"query": [-1], "items": [[1]]}, 400, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, 400, "label_token_ids"),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, 400, "label_token_ids"),
        ({"query": "a", "items": ["b"], "apply_softmax": "yes"}, 400, "apply_softmax"),
        ({"query": "a", "items": ["b"], "model": "other"}, 404, "model"),
        ({"query": [70] * CONTEXT_TOKENS, "items": [[70]]}, 413, "items"),
    ],
)
def test_bad_score_field_is_rejected_by_name(
    api: Api, body: dict[str, object], status: int, param: str
) -> None:
    response = score(api, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert api.rank.submits.empty()
