"""Classification: prompts, labels, both ways of scoring, order, usage."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.classification.classify import (
    ClassifyTask,
    applicable_labels,
    classify_row,
    label_tasks,
    render_prompt,
    softmax,
)
from contracts.errors import RankError
from contracts.messages import Scored, Submit
from contracts.requests import Priority, Usage
from models.text.tokenizer import Tokenizer
from tests.support.api_harness import CONTEXT_TOKENS, Api, refused, tokenize_row
from tests.support.fake_rank import CACHED_TOKENS, token_logprob
from tests.support.tokenization import continuations

SEVERAL = ["entirely positive", "no"]


@pytest.fixture(autouse=True)
def tokenizer(api: Api) -> Tokenizer:
    """Return the tokenizer after dropping what earlier tests sent."""
    api.received()
    return api.tokenizer


def task(labels: list[str], **fields: Any) -> ClassifyTask:
    return ClassifyTask(labels=tuple(labels), **fields)


def distinct_one_token_labels(tokenizer: Tokenizer) -> list[str]:
    found = []
    for word in ("answer", "fox", "dog", "is", "the", "positive", "yes", "one", "quick", "a"):
        if len(continuations(tokenizer, "x", [f" {word}"])[1][0]) == 1:
            found.append(word)
    assert len(found) >= 2
    return found[:3]


def test_single_token_label_probabilities_are_softmax_of_logits(
    api: Api, tokenizer: Tokenizer
) -> None:
    labels = distinct_one_token_labels(tokenizer)
    body = api.post("/v1/classify", input=["x", "y"], labels=labels, prefix="Say: ").json()
    for row, text in zip(body["data"], ["x", "y"], strict=True):
        submit = api.rank.submits.get(timeout=5)
        assert submit.sampling is None
        assert submit.score_from is None
        assert submit.token_ids == tokenizer.encode(f"Say: {text}")
        assert submit.candidates is not None
        assert [tokenizer.decode([token]) for token in submit.candidates] == [
            f" {label}" for label in labels
        ]
        assert row["probs"] == softmax([token_logprob(token) for token in submit.candidates])
        assert row["label"] == labels[row["probs"].index(max(row["probs"]))]
    assert [row["index"] for row in body["data"]] == [0, 1]
    assert api.rank.submits.empty()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * CACHED_TOKENS


def test_longer_labels_share_pass_for_first_tokens(api: Api, tokenizer: Tokenizer) -> None:
    body = api.post("/v1/classify", input="Well,", labels=SEVERAL).json()
    prompt_ids, label_ids = continuations(tokenizer, "Well,", [f" {label}" for label in SEVERAL])
    submits = api.received()
    firsts = list(dict.fromkeys(ids[0] for ids in label_ids))
    assert (submits[0].token_ids, submits[0].candidates) == (prompt_ids, firsts)
    for submit in submits[1:]:
        after = submit.token_ids[len(prompt_ids) :]
        assert submit.token_ids[: len(prompt_ids)] == prompt_ids
        assert any(ids[: len(after)] == after and len(ids) > len(after) for ids in label_ids)
    totals = [math.fsum(token_logprob(token) for token in ids) for ids in label_ids]
    assert body["data"][0]["probs"] == softmax(totals)


def test_options_are_scored_by_letter(api: Api, tokenizer: Tokenizer) -> None:
    labels = ["the second half", "a"]
    template = "{text}\n{options}\nAnswer:"
    row = api.post("/v1/classify", input="Which?", labels=labels, template=template).json()
    submit = api.rank.submits.get(timeout=5)
    prompt = "Which?\nA. the second half\nB. a\nAnswer:"
    assert submit.candidates is not None
    sent = [tokenizer.decode([*submit.token_ids, token]) for token in submit.candidates]
    assert sent == [f"{prompt} A", f"{prompt} B"]
    assert row["data"][0]["label"] in labels
    assert row["data"][0]["num_classes"] == 2


def test_too_many_options_or_multilabel_options_are_rejected(api: Api) -> None:
    many = [f"label {number}" for number in range(27)]
    sent = {"template": "{text} {options} {label}", "input": "x"}
    response = api.post("/v1/classify", labels=many, **sent)
    refused(response, 400, "labels", "27 are more than the 26 letters")
    response = api.post("/v1/classify", labels=many[:2], multi_label=True, **sent)
    refused(response, 400, "template", "{options}")


def test_rows_keep_their_order(api: Api, tokenizer: Tokenizer) -> None:
    texts = [f"row {index}" for index in range(200)]
    body = api.post("/v1/classify", input=texts, labels=SEVERAL, priority="be").json()
    assert [row["index"] for row in body["data"]] == list(range(200))
    assert api.rank.submits.get(timeout=5).priority is Priority.BE


def test_row_beyond_context_gets_413_before_ranks_receive_work(
    api: Api, tokenizer: Tokenizer
) -> None:
    response = api.post("/v1/classify", input=["ok", "x " * CONTEXT_TOKENS], labels=["yes", "no"])
    refused(response, 413, "input", str(CONTEXT_TOKENS))
    assert api.rank.submits.empty()


@given(text=st.text(), prefix=st.text())
def test_template_is_filled_once_and_literally(text: str, prefix: str) -> None:
    wanted = task(["a"], prefix=prefix, template="{prefix}|{text}|{0}|{{text}}")
    assert render_prompt(wanted, text) == f"{prefix}|{text}|{{0}}|{{{text}}}"


@pytest.mark.parametrize("prompt", ["Answer:", "Answer: "])
@pytest.mark.parametrize("label", ["yes", " yes"])
def test_prompt_and_label_are_separated_by_one_space(
    tokenizer: Tokenizer, prompt: str, label: str
) -> None:
    if prompt.endswith(" ") and label.startswith(" "):
        return  # taken as given: two spaces
    row = tokenize_row(tokenizer, task([label]), prompt)
    (only,) = row.labels.passes
    assert tokenizer.decode([*row.prompt_ids, *only.path, *only.candidates]) == "Answer: yes"


@pytest.mark.parametrize("logprobs", [None, [], [float("nan")] * 9])
def test_invalid_scores_raise_error(tokenizer: Tokenizer, logprobs: list[float] | None) -> None:
    class BadRank:
        async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
            return Scored(1, Usage(prompt_tokens=1), candidate_logprobs=logprobs)

    row = tokenize_row(tokenizer, task(SEVERAL), "x")
    with pytest.raises(RankError):
        asyncio.run(classify_row(BadRank(), task(SEVERAL), row))


@given(scores=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8))
def test_softmax_sums_to_one_and_keeps_order(scores: list[float]) -> None:
    probs = softmax(scores)
    assert math.isclose(math.fsum(probs), 1.0)
    for i, left in enumerate(scores):
        for j, right in enumerate(scores):
            assert left < right or probs[i] >= probs[j]


QUESTION_LABELS = ["fox", "dog", "{text}"]
QUESTION = "{prefix}{text} Is it {label}? Answer:"


@pytest.fixture
def classified(api: Api) -> dict[str, Any]:
    body = {"input": ["x", "y"], "labels": QUESTION_LABELS, "prefix": "Say: ", "multi_label": True}
    response = api.post("/v1/classify", **body, template=QUESTION)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(api: Api, prompt: str) -> float:
    """Return the probability of " yes" against " no" from the fake rank's scores."""
    _, both = continuations(api.tokenizer, prompt, [" yes", " no"])
    return softmax([sum(map(token_logprob, ids)) for ids in both])[0]


def test_label_probability_is_yes_against_no(api: Api, classified: dict[str, Any]) -> None:
    for row, text in zip(classified["data"], ["x", "y"], strict=True):
        prompts = [f"Say: {text} Is it {label}? Answer:" for label in QUESTION_LABELS]
        assert row["probs"] == pytest.approx([expected(api, prompt) for prompt in prompts])
        assert row["num_classes"] == len(QUESTION_LABELS)
        assert row["label"] == applicable_labels(QUESTION_LABELS, row["probs"])
    assert [row["index"] for row in classified["data"]] == [0, 1]


def test_labels_and_texts_are_filled_in_once() -> None:
    task = ClassifyTask(labels=("{text}", "b"), template="{text}|{label}|{label}")
    assert [render_prompt(each, "{label}") for each in label_tasks(task)] == [
        "{label}|{text}|{text}",
        "{label}|b|b",
    ]


def test_labels_apply_from_probability_one_half() -> None:
    assert applicable_labels(("a", "b", "c"), (0.5, 0.49, 0.9)) == ["a", "c"]
    assert applicable_labels(("a",), (0.1,)) == []


LABELS = [60, 61, 65]


def score(api: Api, **body: object) -> Any:
    return api.http.post("/v1/score", json={"label_token_ids": LABELS, **body})


def prompts(api: Api) -> list[list[int]]:
    return [submit.token_ids for submit in api.received()]


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
