"""Salts isolate the prefix caches of clients."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from actors.batching.scheduler import Scheduler
from actors.batching.sequence import Sequence
from actors.channels.handshake import Identity
from actors.kv.block_manager import BlockManager
from cluster.http.app import build_app
from cluster.http.authenticator import Authenticator, with_cache_salt
from cluster.http.schemas import MAX_CACHE_SALT_CHARACTERS, ModelInfo
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend, Pipelines
from cluster.routing.prefill_placer import PrefillPlacer
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from contracts.config import HttpConfig, KvConfig, ScheduleConfig, TandemConfig
from contracts.messages import Submit
from contracts.requests import Caller, Sampling
from models.text.tokenizer import Tokenizer
from planner.routing.open_requests import token_work
from planner.routing.worker_state import SaturationConfig
from tests.support.async_tests import run_async
from tests.support.group_harness import PrefillThreads, ThreadGroup, prefill_config
from tests.support.tiny_models import Checkpoints
from tests.support.tiny_tokenizer import write_byte_level

BLOCK = 4
KEYS = ["first-key", "second-key"]
PROMPT = list(range(40, 40 + 6 * BLOCK + 2))  # the last block is not full
SALTS = (b"", b"a" * 16, b"b" * 16)

Send = Callable[..., Awaitable[int]]


@pytest.fixture(scope="module")
def ranks(
    tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[tuple[str, str, bytes]], Tokenizer]]:
    """Return (name, address, token) of an attention rank and a prefill worker with a real model."""
    folder, texts = tiny_checkpoint(vocab_size=420), tmp_path_factory.mktemp("texts")
    write_byte_level(texts)
    config = prefill_config(kv={"block_tokens": BLOCK, "pool_tokens": 512 * BLOCK})
    with ThreadGroup(folder, config) as group, PrefillThreads(folder, config) as prefill:
        attention, worker = group.attention[0].ready, prefill.workers[0].ready
        yield (
            [
                (attention.name, attention.client_address, group.token),
                (worker.name, worker.client_address, prefill.token),
            ],
            Tokenizer.load(texts),
        )


@asynccontextmanager
async def api_client(
    ranks: tuple[list[tuple[str, str, bytes]], Tokenizer],
    keys: list[str],
    *,
    share_between_keys: bool = False,
) -> AsyncIterator[Send]:
    """Yield send(key, path, prompt, …), which returns the answer's cached_tokens."""
    (attention, prefill), tokenizer = ranks
    saturation = SaturationConfig(fallback_prompts=(1,), pinned=10**12)
    clients = [
        RankClient(name, address, Identity(name="ingress", token=token, epoch=None))
        for name, address, token in (attention, prefill)
    ]
    limits = RoutingConfig(block_tokens=BLOCK)
    backend = Pipelines(
        PipelineBackend(LeastWorkPlacer(clients[:1], limits)),
        PipelineBackend(PrefillPlacer(clients[1:], limits, saturation, token_work)),
    )
    model = ModelInfo(name="m", max_context_tokens=256, vocab_size=420, eos_token_ids=())
    app = build_app(
        backend,
        tokenizer,
        model,
        TandemConfig(
            http=HttpConfig(api_keys=list(keys)), kv=KvConfig(share_between_keys=share_between_keys)
        ),
    )
    backend.start()
    await backend.wait_ready()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

        async def send(key: str | None, path: str, **body: Any) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await http.post(path, json={"model": "m", **body}, headers=headers)
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert isinstance(cached, int)
            return cached

        try:
            yield send
        finally:
            await backend.close()


TEXT = "the quick brown fox jumps over the lazy dog and comes back again"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
    "one token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "echo": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "echo": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    ),
    "classify": ("/v1/classify", {"input": TEXT, "labels": ["a", "b"], "template": "{text}\n"}),
    "score": ("/v1/score", {"query": PROMPT[:-3], "items": [PROMPT[-3:]], "label_token_ids": [5]}),
}


@pytest.mark.parametrize("by_key", [True, False], ids=["keys", "salts"])
@pytest.mark.parametrize("what", BODIES)
@run_async
async def test_client_or_salt_finds_only_its_own_prefix(
    ranks: Any, what: str, by_key: bool
) -> None:
    path, body = BODIES[what]
    names = [f"first {what}", f"second {what}"]
    keys = [name.replace(" ", "-") for name in names] if by_key else []

    async with api_client(ranks, keys) as send:

        async def cached(number: int) -> int:
            if by_key:
                return await send(keys[number], path, **body)
            return await send(None, path, **body, cache_salt=names[number])

        assert await cached(0) == 0
        again = await cached(0)
        assert again > 2 * BLOCK
        assert await cached(1) == 0, "sent by the first one"
        assert await cached(1) == again


@run_async
async def test_keys_share_prefixes_if_configured(ranks: Any) -> None:
    body = {"prompt": [*PROMPT, 7], "max_tokens": 2}
    async with api_client(ranks, KEYS, share_between_keys=True) as send:
        await send(KEYS[0], "/v1/completions", **body)
        assert await send(KEYS[1], "/v1/completions", **body) == len(PROMPT)
        assert await send(KEYS[1], "/v1/completions", **body, cache_salt="mine") == 0


@run_async
async def test_cache_salt_outside_length_bounds_is_rejected(ranks: Any) -> None:
    async with api_client(ranks, []) as send:
        for path, body in BODIES.values():
            many = MAX_CACHE_SALT_CHARACTERS + 1
            for salt, problem in (("", "is empty"), ("x" * many, f"has {many} characters")):
                with pytest.raises(AssertionError, match=f"cache_salt {problem}"):
                    await send(None, path, **body, cache_salt=salt)


# ---- tables of blocks


def submit(salt: bytes, token_ids: list[int] = PROMPT, **fields: Any) -> Submit:
    fields.setdefault("sampling", None)
    return Submit(request_id=0, token_ids=token_ids, caller=Caller(salt=salt), **fields)


def test_blocks_and_batches_are_shared_per_salt() -> None:
    """Sends all at once, so that they meet in one batch, and again, from the cache."""
    scheduler = Scheduler(ScheduleConfig(), BlockManager(100))
    cached = []
    for turn in range(2):
        for number, salt in enumerate((*SALTS, *SALTS)):
            for text in (PROMPT, PROMPT[: BLOCK - 1]):  # the second has no full block
                key = (0, 1000 * turn + 100 * number + len(text))
                scheduler.add(Sequence(key, submit(salt, text), BLOCK))
        batch = scheduler.next_batch()
        assert batch is not None
        cached += [c.sequence.num_cached for c in batch.chunks]
        for chunk in batch.chunks:
            chunk.sequence.done = True
        scheduler.complete(batch)
    most, short = len(PROMPT) - 1, BLOCK - 2
    # Each salt's short prompt finds the head of the block that its long one fills.
    first = [0, short] * len(SALTS) + [most, short] * len(SALTS)
    assert cached == [*first, *[most, short] * (2 * len(SALTS))]


def caller_of(authenticator: Authenticator, key: str) -> Caller:
    return authenticator.caller(authenticator.clients[key])


def test_key_digest_hides_key_and_is_equal_in_all_replicas() -> None:
    one, other = (Authenticator(HttpConfig(api_keys=[*keys])) for keys in (KEYS, KEYS[::-1]))
    for key in KEYS:
        caller = caller_of(one, key)
        same = caller_of(other, key)
        assert (caller.tenant, caller.salt) == (same.tenant, same.salt)
        wire = repr(submit(caller.salt, sampling=Sampling())).encode() + caller.tenant
        assert key.encode() not in wire
    assert caller_of(one, KEYS[0]).salt != caller_of(one, KEYS[1]).salt
    assert caller_of(one, KEYS[0]).tenant != caller_of(one, KEYS[1]).tenant
    assert caller_of(one, KEYS[0]).request != caller_of(one, KEYS[0]).request


def test_cache_salt_is_mixed_into_key_salt() -> None:
    authenticator = Authenticator(HttpConfig(api_keys=[*KEYS]))
    salts = [
        with_cache_salt(caller, cache_salt).salt
        for caller in (*(caller_of(authenticator, key) for key in KEYS), Caller())
        for cache_salt in (None, "a", "b")
    ]
    assert len(set(salts)) == len(salts)
