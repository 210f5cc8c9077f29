"""Memory of open requests is counted, and released however they end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.http.cost import MemoryBudget
from cluster.http.text import TokenizerPool
from contracts.config import LimitsConfig
from contracts.errors import TandemError
from models.text.encoding_steps import EncodingSteps
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank

LIMITS = LimitsConfig(open_bytes=1 << 20, request_fraction=0.5)
CHAT: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(folder: Path) -> Iterator[Api]:
    rank = FakeRank("attention-0", lambda submit: [60, 61, 62])
    with serve_api(folder, [rank], config=LIMITS) as api:
        yield api


def budget_of(api: Api) -> MemoryBudget:
    budget: MemoryBudget = api.app.state.memory_budget
    return budget


def settled(api: Api) -> None:
    """Wait until nothing is held, or fail."""

    async def wait() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while budget_of(api).held_bytes:
                await asyncio.sleep(0.01)

    api.loop.run(wait())


ENDINGS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "a"}, 200),
    ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 2, "echo": True}, 200),
    ("/v1/completions", {"prompt": ["a b"] * 50, "echo": True, "logprobs": 5}, 200),
    ("/v1/completions", {"prompt": [5] * 300}, 413),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, 400),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "n": 3}, 200),
    ("/v1/classify", {"input": ["a"] * 100, "labels": ["b", "c"]}, 200),
    ("/v1/classify", {"input": "a", "labels": ["b", "b"]}, 400),
    ("/v1/score", {"query": "q", "items": ["i"] * 100, "label_token_ids": [5]}, 200),
    ("/v1/score", {"query": "q", "items": ["i" * 600_000], "label_token_ids": [5]}, 413),
]


@pytest.mark.parametrize(("path", "fields", "status"), ENDINGS)
def test_memory_is_released_after_response(
    api: Api, path: str, fields: dict[str, Any], status: int
) -> None:
    assert api.post(path, **fields).status_code == status
    settled(api)


def test_memory_is_released_after_rank_failure(api: Api) -> None:
    api.rank.fail_with = ("broken", "internal_error", 500)
    assert api.post("/v1/completions", prompt="a").status_code == 500
    settled(api)


def connected(api: Api, body: bytes, declared: int) -> socket.socket:
    address = urlsplit(api.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        f"Content-Length: {declared}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_growing_bodies_are_charged_and_others_get_429(api: Api) -> None:
    part = b'{"model": "tiny", "user": "' + b"x" * 400_000
    hogs = [connected(api, part, 500_000) for _ in range(2)]

    async def read() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while budget_of(api).held_bytes < 2 * len(part):
                await asyncio.sleep(0.01)

    api.loop.run(read())
    refused = api.post("/v1/completions", prompt="a", user="x" * 300_000)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "limits.open_bytes" in refused.json()["error"]["message"]
    assert api.post("/v1/completions", prompt="a").status_code == 200, "a small request fits"
    for hog in hogs:
        hog.close()
    settled(api)
    assert api.post("/v1/completions", prompt="a", user="x" * 200_000).status_code == 200


def test_disconnected_client_releases_memory(api: Api) -> None:
    api.rank.hold_scores = True
    body = json.dumps({"model": MODEL, "query": "q", "items": ["i"] * 9, "label_token_ids": [1]})
    request = httpx.Request("POST", f"{api.url}/v1/score", content=body)
    pending = api.loop.start(api.send(request))
    api.rank.submits.get(timeout=TIMEOUT_S)
    assert budget_of(api).held_bytes > 0
    pending.cancel()
    settled(api)


def test_thread_work_stops_after_cancellation(folder: Path) -> None:
    tokenizer_pool = TokenizerPool(Tokenizer.load(folder), 1)
    at_work, go_on = threading.Event(), threading.Event()
    steps_taken = 0

    def endless() -> EncodingSteps[None]:
        nonlocal steps_taken
        while True:
            steps_taken += 1
            at_work.set()
            assert go_on.wait(TIMEOUT_S)
            yield 1

    async def main() -> None:
        work = asyncio.create_task(
            tokenizer_pool.run(endless(), THREAD_ABOVE_CHARACTERS + 1, lambda _: None)
        )
        await asyncio.to_thread(at_work.wait, TIMEOUT_S)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        go_on.set()
        text = "a b " * THREAD_ABOVE_CHARACTERS  # the only thread is shared
        await tokenizer_pool.encode([text], lambda _: None, param="x", characters=len(text))

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert steps_taken == 1


def test_long_tokenization_does_not_block_others(folder: Path) -> None:
    tokenizer_pool = TokenizerPool(Tokenizer.load(folder), 1)
    order: list[str] = []

    def steps(name: str, count: int) -> EncodingSteps[None]:
        for _ in range(count):
            order.append(name)
            yield 0

    async def main() -> None:
        many = THREAD_ABOVE_CHARACTERS + 1
        await asyncio.gather(
            tokenizer_pool.run(steps("long", 50), many, lambda _: None),
            tokenizer_pool.run(steps("short", 3), many, lambda _: None),
        )

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert order.index("short") < 3
    assert len(order) - 1 - order[::-1].index("short") < 12


def test_charging_error_ends_tokenization(folder: Path) -> None:
    tokenizer_pool = TokenizerPool(Tokenizer.load(folder), 1)
    account = MemoryBudget(LIMITS).open()
    texts = ["a b c " * 30_000] * 100

    async def main() -> None:
        with pytest.raises(TandemError, match=r"limits\.open_bytes"):
            await tokenizer_pool.encode(
                texts, account.charge, param="prompt", characters=sum(map(len, texts))
            )

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
