"""The API without sockets: requests enter the ASGI application, and ranks that compute nothing."""

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from benchmarks.robustness.fuzz.oracle import LIMIT_S, Answer
from benchmarks.robustness.fuzz.requests import FuzzRequest
from cluster.http.app import build_app
from cluster.serving.ingress_app import served_model
from contracts.config import HttpConfig, TandemConfig
from contracts.messages import Finished, Scored, Submit, TokenLogprob, Tokens
from contracts.requests import Usage
from contracts.scaling import ScaleState, ScaleTarget
from tests.support.api_harness import FakeLauncher

KEY = "a-key-of-the-fuzzer"
OPERATOR_KEY = "a-key-of-the-operator"
MAX_BODY_BYTES = 1 << 20  # below the default: larger bodies should be cheap
MAX_BATCH_ITEMS = 64
MAX_TOKENS = 4  # of an answer, whatever the request
FIRST_ID, IDS = 60, 400  # tokens of plain text in the bundled tokenizer


class StubBackend:
    """Answers that follow from the request alone. open_requests: requests that have not ended."""

    def __init__(self) -> None:
        self.open_requests = 0

    async def generate(
        self, submit: Submit, **_: Any
    ) -> AsyncGenerator[list[Tokens | Finished], None]:
        assert submit.sampling is not None
        self.open_requests += 1
        try:
            count = min(MAX_TOKENS, submit.sampling.max_tokens)
            top = submit.sampling.logprobs
            first = FIRST_ID + sum(submit.token_ids) % IDS
            for token_id in range(first, first + count):
                logprobs = None if top is None else [_logprob(token_id, top)]
                yield [Tokens(submit.request_id, [token_id], logprobs, 0)]
            usage = Usage(prompt_tokens=len(submit.token_ids), completion_tokens=count)
            yield [Finished(submit.request_id, "length", usage)]
        finally:
            self.open_requests -= 1

    async def score(self, submit: Submit, **_: Any) -> Scored:
        usage = Usage(prompt_tokens=len(submit.token_ids))
        logits = logprobs = tops = None
        if submit.candidates is not None:
            logits = [_of(token_id) for token_id in submit.candidates]
        if submit.score_from is not None:
            scored = submit.token_ids[submit.score_from :]
            logprobs = [_of(token_id) for token_id in scored]
            if submit.score_top:
                tops = [_logprob(token_id, submit.score_top).top for token_id in scored]
        return Scored(submit.request_id, usage, logits, logits, logprobs, tops)

    def pool_tokens(self, *, prefill: bool) -> int | None:
        return None

    def problems(self) -> list[str]:
        return []

    def waiting(self) -> Mapping[tuple[str, str], int]:
        return {}


def _of(token_id: int) -> float:
    return -0.25 - (token_id % 8) / 4


def _logprob(token_id: int, top: int) -> TokenLogprob:
    return TokenLogprob(_of(token_id), [(token_id + by, _of(token_id) - by) for by in range(top)])


def fuzzed_app(backend: StubBackend | None = None) -> tuple[ASGIApp, StubBackend]:
    """Return the application with the bundled model's tokenizer, and its backend."""
    model, tokenizer = served_model(TandemConfig())
    http = HttpConfig(
        api_keys=[KEY],
        operator_key=OPERATOR_KEY,
        max_body_bytes=MAX_BODY_BYTES,
        max_batch_items=MAX_BATCH_ITEMS,
    )
    backend = backend or StubBackend()
    return build_app(
        backend, tokenizer, model, TandemConfig(http=http), launcher=FakeLauncher(scale=scaled)
    ), backend


async def scaled(requested: ScaleTarget | None) -> ScaleState:
    """A launcher that scales immediately."""
    return ScaleState(requested=requested or ScaleTarget(), ranks={"attention_ranks": 1})


class InProcess:
    """Sends requests to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(self, request: FuzzRequest) -> Answer:
        exchange = _Exchange(request)
        fault = ""
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                await self._app(_scope(request), exchange.receive, exchange.send)
        except TimeoutError:
            fault = f"no answer within {2 * LIMIT_S:g} s"
        except Exception:  # noqa: BLE001 - any exception is a finding
            fault = traceback.format_exc()
        duration_s = time.perf_counter() - started_s
        return Answer(exchange.status, exchange.headers, bytes(exchange.body), duration_s, fault)

    async def close(self) -> None:
        pass


class _Exchange:
    """A client that sends the whole request and then waits for the answer."""

    def __init__(self, request: FuzzRequest) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._unsent = _pieces(request)

    async def receive(self) -> Message:
        if self._unsent:
            piece = self._unsent.pop(0)
            more = bool(self._unsent)
            return {"type": "http.request", "body": piece, "more_body": more}
        await asyncio.Event().wait()  # the client stays connected
        raise AssertionError("the event is never set")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            pairs = message.get("headers", ())
            self.headers = {name.decode().lower(): value.decode() for name, value in pairs}
        else:
            self.body += message.get("body", b"")


def _pieces(request: FuzzRequest) -> list[bytes]:
    step = max(1, -(-len(request.body) // request.pieces))
    cuts = range(0, len(request.body), step)
    return [request.body[start : start + step] for start in cuts] or [b""]


def _scope(request: FuzzRequest) -> dict[str, Any]:
    headers = [*request.headers, ("host", "tandem"), ("content-length", str(len(request.body)))]
    raw = request.path.encode("utf-8", "surrogatepass")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(request.path, errors="replace"),
        "raw_path": raw,
        "query_string": request.query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("tandem", 80),
    }
