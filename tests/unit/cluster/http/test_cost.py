"""Costly requests are rejected before anything is built. Tests watch the process's memory."""

import asyncio
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.http.cost import MemoryBudget
from cluster.http.text import TokenizerPool
from contracts.config import LimitsConfig
from models.text.chat_template import EncodingSteps
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer
from tests.support.api_harness import CONTEXT_TOKENS, TIMEOUT_S, Api, refused, serve_api
from tests.support.async_tests import run_async
from tests.support.fake_rank import FakeRank
from tests.support.front_harness import post
from tests.support.waiting import wait_until

PEAK_BYTES = 24 << 20


@contextmanager
def bounded_memory(most: int = PEAK_BYTES) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "template", "part"),
    [
        ({"input": "x" * 20_000}, "{text}" * 3000, "60000000"),
        ({"prefix": "x" * 20_000}, "{text}" + "{prefix}" * 3000, "context"),
        ({"labels": ["a" * 9_000, "b" * 9_000]}, "{text}" + "{options}" * 3000, "context"),
        (
            {"multi_label": True, "labels": ["a" * 9_000, "b"]},
            "{text}" + "{label}" * 3000,
            "context",
        ),
    ],
)
def test_repeated_placeholders_are_rejected_before_rendering(
    api: Api, fields: dict[str, Any], template: str, part: str
) -> None:
    with bounded_memory():
        response = api.post(
            "/v1/classify", **{"input": "t", "labels": ["a", "b"], "template": template, **fields}
        )
    refused(response, 413, "template", part, "context")
    assert api.rank.submits.empty()


def test_query_is_counted_with_each_item(api: Api) -> None:
    with bounded_memory():
        long = api.post("/v1/score", query="x" * 20_000, items=["y"] * 2000, label_token_ids=[1])
        ids = api.post("/v1/score", query=[5] * 20_000, items=[[6]] * 2000, label_token_ids=[1])
    refused(long, 413, "items", "20001", "context")
    refused(ids, 413, "items")


def test_total_prompt_tokens_are_bounded(api: Api) -> None:
    with serve_api(api.folder, config=LimitsConfig(pass_tokens=10_000)) as small:
        ids = small.post("/v1/score", query=[5] * 200, items=[[6]] * 100, label_token_ids=[1])
        refused(ids, 413, "items", "20100", "limits.pass_tokens")
        text = small.post("/v1/score", query="a b " * 40, items=["y"] * 200, label_token_ids=[1])
        refused(text, 413, "items", "limits.pass_tokens")
        rows = small.post("/v1/classify", input=["a b " * 40] * 200, labels=["a", "b"])
        refused(rows, 413, "input", "limits.pass_tokens")
        many = small.post("/v1/completions", prompt=[[5] * 100] * 10, n=10)
        refused(many, 413, "prompt", "11600", "limits.pass_tokens")
        chat = small.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}],
            n=128,
            max_tokens=100,
        )
        refused(chat, 413, "n", "limits.pass_tokens")


def test_echo_is_rejected_by_answer_size(api: Api) -> None:
    body = {"prompt": [[5] * 240] * 32, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 0}
    with bounded_memory():
        response = api.post("/v1/completions", **body)
    refused(response, 413, "logprobs", "limits.answer_bytes")
    streamed = api.post("/v1/completions", **body, stream=True)
    refused(streamed, 413, "logprobs", "limits.answer_bytes")
    assert api.rank.submits.empty()


def test_long_label_in_every_row_is_rejected_by_answer_size(api: Api) -> None:
    labels = ["a" * 2_000, "b" * 2_000]
    template = "{text}{options}"
    response = api.post("/v1/classify", input=["t"] * 4096, labels=labels, template=template)
    refused(response, 413, "template", "context")
    with serve_api(api.folder, config=LimitsConfig(answer_bytes=100_000)) as small:
        response = small.post("/v1/classify", input=["t"] * 1000, labels=["a" * 200, "b"])
        refused(response, 413, "labels", "248000", "limits.answer_bytes")
        response = small.post(
            "/v1/score", query="q", items=["i"] * 100, label_token_ids=list(range(100))
        )
        refused(response, 413, "items", "240000", "limits.answer_bytes")


def test_total_label_tokens_are_bounded(api: Api) -> None:
    with serve_api(api.folder, config=LimitsConfig(label_tokens=100)) as small:
        by_characters = small.post("/v1/classify", input="t", labels=["a" * 50_000, "b"])
        refused(by_characters, 413, "labels", "limits.label_tokens")
        by_tokens = small.post(
            "/v1/classify", input="t", labels=["a z " * 30 + letter for letter in "abc"]
        )
        refused(by_tokens, 413, "labels", "limits.label_tokens")


def test_too_long_conversation_is_rejected_while_rendering(api: Api) -> None:
    message = {"role": "user", "content": "x" * 100_000}
    with bounded_memory():
        response = api.post("/v1/chat/completions", messages=[message] * 2)
    refused(response, 413, "messages")
    short = {"role": "user", "content": ""}
    refused(
        api.post("/v1/chat/completions", messages=[short] * (CONTEXT_TOKENS + 1)),
        *(413, "messages", str(CONTEXT_TOKENS)),
    )


def test_default_max_tokens_is_reduced_to_limits(api: Api) -> None:
    with serve_api(
        api.folder, config=LimitsConfig(pass_tokens=4_000, answer_bytes=10_000)
    ) as small:
        chat = [{"role": "user", "content": "a"}]
        assert small.post("/v1/chat/completions", messages=chat).status_code == 200
        assert small.post("/v1/chat/completions", messages=chat, n=50).status_code == 200
        small.rank.submits.get(timeout=5)
        logprobs = {"logprobs": True, "top_logprobs": 20}
        assert small.post("/v1/chat/completions", messages=chat, **logprobs).status_code == 200


def test_default_chat_max_tokens_is_reduced_to_kv_pool(api: Api) -> None:
    rank = FakeRank("attention-0", lambda submit: [60])
    rank.total_blocks = 4
    chat = [{"role": "user", "content": "a"}]
    with serve_api(api.folder, [rank], block_tokens=16) as small:
        assert small.post("/v1/chat/completions", messages=chat).status_code == 200
        submit = rank.submits.get(timeout=5)
        assert submit.sampling is not None
        assert len(submit.token_ids) + submit.sampling.max_tokens == 64
        stated = small.post("/v1/chat/completions", messages=chat, max_tokens=100)
        refused(stated, 400, "max_tokens", "64 tokens", "kv.pool_tokens")
        long = small.post("/v1/completions", prompt=[5] * 100)
        refused(long, 413, "prompt", "64", "kv.pool_tokens")


LIMITS = LimitsConfig(open_bytes=1 << 20, request_fraction=0.5)
CHAT: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def small(folder: Path) -> Iterator[Api]:
    with serve_api(folder, config=LIMITS) as small:
        yield small


def budget_of(small: Api) -> MemoryBudget:
    return small.app.app_state.memory_budget


def settled(small: Api) -> None:
    """Wait until nothing is held, or fail."""
    wait_until(lambda: not budget_of(small).held_bytes, "memory is held", TIMEOUT_S, 0.01)


ENDINGS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 2, "echo": True}, 200),
    ("/v1/completions", {"prompt": [5] * 300}, 413),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, 400),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "n": 3}, 200),
    ("/v1/classify", {"input": ["a"] * 100, "labels": ["b", "c"]}, 200),
    ("/v1/classify", {"input": "a", "labels": ["b", "b"]}, 400),
    ("/v1/score", {"query": "q", "items": ["i" * 600_000], "label_token_ids": [5]}, 413),
]


@pytest.mark.parametrize(("path", "fields", "status"), ENDINGS)
def test_memory_is_released_after_response(
    small: Api, path: str, fields: dict[str, Any], status: int
) -> None:
    assert small.post(path, **fields).status_code == status
    settled(small)


def test_growing_bodies_are_charged_and_others_get_429(small: Api) -> None:
    part = b'{"model": "tiny", "user": "' + b"x" * 400_000
    hogs = [small.connect() for _ in range(2)]
    for hog in hogs:
        hog.sendall(post("/v1/completions", part, length=500_000))
    read_bytes = 2 * len(part)
    wait_until(lambda: budget_of(small).held_bytes >= read_bytes, "not read", TIMEOUT_S, 0.01)
    refused = small.post("/v1/completions", prompt="a", user="x" * 300_000)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "limits.open_bytes" in refused.json()["error"]["message"]
    assert small.post("/v1/completions", prompt="a").status_code == 200, "a small request fits"
    for hog in hogs:
        hog.close()
    settled(small)
    assert small.post("/v1/completions", prompt="a", user="x" * 200_000).status_code == 200


def test_disconnected_client_releases_memory(small: Api) -> None:
    small.rank.hold_scores = True
    pending = small.start("/v1/score", query="q", items=["i"] * 9, label_token_ids=[1])
    small.rank.submits.get(timeout=TIMEOUT_S)
    assert budget_of(small).held_bytes > 0
    pending.cancel()
    settled(small)


@run_async
async def test_thread_work_stops_after_cancellation(folder: Path) -> None:
    tokenizer_pool = TokenizerPool(1)
    at_work, go_on = threading.Event(), threading.Event()
    steps_taken = 0

    def endless() -> EncodingSteps[None]:
        nonlocal steps_taken
        while True:
            steps_taken += 1
            at_work.set()
            assert go_on.wait(TIMEOUT_S)
            yield 1

    work = asyncio.create_task(
        tokenizer_pool.run(endless(), THREAD_ABOVE_CHARACTERS + 1, lambda _: None)
    )
    await asyncio.to_thread(at_work.wait, TIMEOUT_S)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    go_on.set()
    text = "a b " * THREAD_ABOVE_CHARACTERS  # the only thread is shared
    steps = Tokenizer.load(folder).encode_steps([text], param="x")
    await tokenizer_pool.run(steps, len(text), lambda _: None)
    assert steps_taken == 1


@run_async
async def test_long_tokenization_does_not_block_others() -> None:
    tokenizer_pool = TokenizerPool(1)
    order: list[str] = []

    def steps(name: str, count: int) -> EncodingSteps[None]:
        for _ in range(count):
            order.append(name)
            yield 0

    many = THREAD_ABOVE_CHARACTERS + 1
    await asyncio.gather(
        tokenizer_pool.run(steps("long", 50), many, lambda _: None),
        tokenizer_pool.run(steps("short", 3), many, lambda _: None),
    )
    assert order.index("short") < 3
    assert len(order) - 1 - order[::-1].index("short") < 12
