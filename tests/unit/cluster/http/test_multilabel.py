"""Multi-label classification: one yes-or-no question per text and label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.classification.classify import (
    ClassifyTask,
    applicable_labels,
    label_tasks,
    render_prompt,
    softmax,
)
from tests.support.api_harness import Api, serve_api
from tests.support.fake_rank import CACHED_TOKENS, FakeRank, token_logprob
from tests.support.tokenization import continuations

LABELS = ["fox", "dog", "{text}"]
TEMPLATE = "{prefix}{text} Is it {label}? Answer:"


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [])]) as api:
        yield api


@pytest.fixture
def classified(api: Api) -> dict[str, Any]:
    while not api.rank.submits.empty():
        api.rank.submits.get()
    body = {"input": ["x", "y"], "labels": LABELS, "prefix": "Say: ", "multi_label": True}
    response = api.post("/v1/classify", **body, template=TEMPLATE)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def answer_ids(api: Api, prompt: str) -> list[list[int]]:
    return continuations(api.tokenizer, prompt, [" yes", " no"])[1]


def expected(api: Api, prompt: str) -> float:
    """Return the probability of " yes" against " no" from the fake rank's scores."""
    totals = [sum(map(token_logprob, ids)) for ids in answer_ids(api, prompt)]
    return softmax(totals)[0]


def test_label_probability_is_yes_against_no(api: Api, classified: dict[str, Any]) -> None:
    for row, text in zip(classified["data"], ["x", "y"], strict=True):
        prompts = [f"Say: {text} Is it {label}? Answer:" for label in LABELS]
        assert row["probs"] == pytest.approx([expected(api, prompt) for prompt in prompts])
        assert row["num_classes"] == len(LABELS)
        assert row["label"] == applicable_labels(LABELS, row["probs"])
    assert [row["index"] for row in classified["data"]] == [0, 1]


def test_single_token_answers_take_one_pass_per_text_and_label(
    api: Api, classified: dict[str, Any]
) -> None:
    seen = []
    while not api.rank.submits.empty():
        seen.append(api.rank.submits.get())
    prompts = [f"Say: {text} Is it {label}? Answer:" for text in "xy" for label in LABELS]
    yes, no = answer_ids(api, prompts[0])
    single = len(yes) == len(no) == 1
    assert len(seen) == len(prompts) * (1 if single else 2)
    if single:
        assert [submit.candidates for submit in seen] == [[yes[0], no[0]]] * len(prompts)
        assert [submit.token_ids for submit in seen] == [api.tokenizer.encode(p) for p in prompts]
    usage = classified["usage"]
    assert usage["prompt_tokens"] == sum(len(submit.token_ids) for submit in seen)
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(seen) * CACHED_TOKENS


def test_labels_and_texts_are_filled_in_once() -> None:
    task = ClassifyTask(labels=("{text}", "b"), template="{text}|{label}|{label}")
    assert [render_prompt(each, "{label}") for each in label_tasks(task)] == [
        "{label}|{text}|{text}",
        "{label}|b|b",
    ]


def test_single_label_template_keeps_label_placeholder() -> None:
    assert render_prompt(ClassifyTask(labels=("a",), template="{text} {label}"), "x") == "x {label}"


def test_labels_apply_from_probability_one_half() -> None:
    assert applicable_labels(("a", "b", "c"), (0.5, 0.49, 0.9)) == ["a", "c"]
    assert applicable_labels(("a",), (0.1,)) == []


def test_answer_matches_openapi_schema(api: Api, classified: dict[str, Any]) -> None:
    schema = api.http.get("/openapi.json").json()["components"]["schemas"]["ClassifiedRow"]
    kinds = [kind["type"] for kind in schema["properties"]["label"]["anyOf"]]
    assert sorted(kinds) == ["array", "string"]
    assert all(isinstance(row["label"], list) for row in classified["data"])
