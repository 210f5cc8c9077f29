"""Sampling fields over HTTP, with a real rank and a tiny model."""

from collections.abc import Iterator
from typing import Any

import pytest
from httpx import Response

from models.text.tokenizer import Tokenizer
from tests.support.api_harness import Api, RunningRank, refused, serve_api
from tests.support.fake_rank import TOKEN
from tests.support.group_harness import ThreadGroup, group_config
from tests.support.tiny_models import Checkpoints
from tests.support.tiny_tokenizer import EOS, write_byte_level, write_sentencepiece_like

pytestmark = pytest.mark.long

PROMPT = "The quick brown fox"
CHAT = [{"role": "user", "content": "yes or no?"}]
CHOICES = ["yes", "no", "yes maybe", "größer 😀", " naïve\n"]


TOKENIZERS = [(write_byte_level, EOS), (write_sentencepiece_like, "</s>")]


@pytest.fixture(scope="module", params=TOKENIZERS, ids=["byte level", "sentencepiece"])
def api(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Checkpoints,
) -> Iterator[Api]:
    write, eos_text = request.param
    folder = write(tmp_path_factory.mktemp("tokenizer"))
    vocabulary = Tokenizer.load(folder).vocab_size
    checkpoint = tiny_checkpoint("qwen3_moe", vocab_size=vocabulary)
    with ThreadGroup(checkpoint, group_config(), token=TOKEN) as group:
        ready = group.attention[0].ready
        ranks: Any = [RunningRank(ready.name, ready.client_address)]
        with serve_api(folder, ranks, eos_text=eos_text) as api:
            yield api


def post(api: Api, path: str = "/v1/completions", **fields: Any) -> Response:
    body = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT, "max_tokens": 12}
    return api.post(path, **{**body, **fields})


def completion(api: Api, **fields: Any) -> dict[str, Any]:
    response = post(api, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(api: Api, path: str, **fields: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Return texts and finish reasons by choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in api.chunks(path, **fields):
        assert "error" not in event, event
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons


# --- guided choice


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_guided_completion_is_one_of_choices(api: Api, field: str, temperature: float) -> None:
    given = CHOICES if field == "guided_choice" else {"choice": CHOICES}
    fields = {field: given, "temperature": temperature, "n": 12, "seed": 4, "logprobs": 2}
    answer = completion(api, max_tokens=60, **fields)
    texts = [choice["text"] for choice in answer["choices"]]
    assert set(texts) <= set(CHOICES)
    assert len(set(texts)) == 1 if temperature == 0 else len(set(texts)) > 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert all(p <= 0 for choice in answer["choices"] for p in choice["logprobs"]["token_logprobs"])
    seen, reasons = streamed(
        api, "/v1/completions", prompt=PROMPT, max_tokens=60, **{**fields, "logprobs": None}
    )
    assert [seen[index] for index in range(12)] == texts
    assert set(reasons.values()) == {"stop"}


@pytest.mark.parametrize("choices", [CHOICES, ["42", "421", "4210"]])
def test_default_max_tokens_fits_longest_choice(api: Api, choices: list[str]) -> None:
    for seed in range(4):
        answer = completion(api, guided_choice=choices, max_tokens=None, seed=seed)
        assert answer["choices"][0]["text"] in choices


def test_guided_chat_is_one_of_choices_streamed_or_not(api: Api) -> None:
    if not has_template(api):
        refused(post(api, "/v1/chat/completions", guided_choice=CHOICES), 400, "messages")
        return
    fields = {"guided_choice": CHOICES, "n": 8, "seed": 1, "temperature": 1.3}
    answer = post(api, "/v1/chat/completions", **fields).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert set(texts) <= set(CHOICES)
    seen, reasons = streamed(api, "/v1/chat/completions", messages=CHAT, **fields)
    assert [seen[index] for index in range(8)] == texts
    assert set(reasons.values()) == {"stop"}


def has_template(api: Api) -> bool:
    return post(api, "/v1/chat/completions", max_tokens=1).status_code == 200


def test_choice_over_max_tokens_is_rejected_with_both_numbers(api: Api) -> None:
    response = post(api, guided_choice=["yes", "maybe neutral positive"], max_tokens=2)
    refused(response, 400, "max_tokens", "max_tokens=2", "longest choice")


BAD_CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": [str(i) for i in range(257)]}, "guided_choice"),
    ({"guided_choice": ["x" * 9000]}, "guided_choice"),
    ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, "guided_choice"),
    ({"guided_choice": ["a", "b"], "min_tokens": 1}, "min_tokens"),
    ({"guided_choice": ["a.b"], "stop": "."}, "stop"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a*", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
    ({"prompt": [str(i) for i in range(128)], "guided_choice": [str(i) for i in range(200)]}, ""),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHOICES)
def test_invalid_choices_are_rejected(api: Api, fields: dict[str, Any], param: str) -> None:
    response = post(api, **{"max_tokens": 200, **fields})
    refused(response, 400, param or "guided_choice")


def test_choice_containing_end_token_is_rejected(api: Api) -> None:
    eos = api.tokenizer.decode(api.eos, skip_special_tokens=False)
    refused(post(api, guided_choice=[f"yes{eos}"]), 400, "guided_choice")
    ids = api.tokenizer.encode("yes", add_special_tokens=False)
    refused(post(api, guided_choice=["yes", "no"], stop_token_ids=ids), 400, "guided_choice")


# --- vLLM's fields


def test_stop_token_ends_answer_and_is_not_shown(api: Api) -> None:
    """As in vLLM: finish_reason is stop, also with ignore_eos."""
    token = api.tokenizer.encode("fox", add_special_tokens=False)[-1]
    bias = {str(token): 100}
    answer = completion(api, logit_bias=bias, stop_token_ids=[token], ignore_eos=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1


def test_min_tokens_defers_every_end(api: Api) -> None:
    """Eos and stop ids are not sampled; an early stop string is text."""
    token = api.tokenizer.encode("fox", add_special_tokens=False)[-1]
    (eos,) = api.eos
    bias = {"logit_bias": {str(eos): 100, str(token): 50}, "temperature": 0}
    assert completion(api, **bias)["usage"]["completion_tokens"] == 1
    late = completion(api, min_tokens=5, **bias)
    assert late["usage"]["completion_tokens"] == 6  # five others, then the eos
    assert late["choices"][0]["finish_reason"] == "stop"
    bias = {"logit_bias": {str(token): 100}, "temperature": 0, "ignore_eos": True}
    name = api.tokenizer.decode([token]).strip()
    assert completion(api, stop=name, **bias)["usage"]["completion_tokens"] <= 2
    late = completion(api, stop=name, min_tokens=4, **bias)
    assert late["choices"][0]["text"].count(name) == 4
    assert late["choices"][0]["finish_reason"] == "stop"
