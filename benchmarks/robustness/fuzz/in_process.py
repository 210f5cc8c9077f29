"""The API itself, without sockets: requests go straight into the ASGI application."""

from __future__ import annotations

import asyncio
import time
import traceback
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from benchmarks.robustness.fuzz.oracle import LIMIT_S, Answer
from benchmarks.robustness.fuzz.requests import Made
from benchmarks.robustness.fuzz.stub_backend import StubBackend
from cluster.http.app import build_app
from cluster.serving.ingress_app import served_model
from contracts.config import HttpConfig, TandemConfig
from contracts.scaling import ScaleState, ScaleTarget

KEY = "a-key-of-the-fuzzer"
OPERATOR_KEY = "a-key-of-the-operator"
MAX_BODY_BYTES = 1 << 20  # smaller than what is served with: bodies beyond it should be cheap
MAX_BATCH_ITEMS = 64


def fuzzed_app(backend: StubBackend | None = None) -> tuple[ASGIApp, StubBackend]:
    """The application with the bundled model's tokenizer, before ranks that compute nothing."""
    model, tokenizer = served_model(TandemConfig())
    http = HttpConfig(
        api_keys=[KEY],
        operator_key=OPERATOR_KEY,
        max_body_bytes=MAX_BODY_BYTES,
        max_batch_items=MAX_BATCH_ITEMS,
    )
    backend = backend or StubBackend()
    return build_app(backend, tokenizer, model, http, scale=scaled), backend


async def scaled(requested: ScaleTarget | None) -> ScaleState:
    """A launcher that is done at once."""
    return ScaleState(requested=requested or ScaleTarget(), ranks={"attention_ranks": 1})


class InProcess:
    """Asks an ASGI application, one request at a time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(self, request: Made) -> Answer:
        exchange = _Exchange(request)
        fault = ""
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                await self._app(_scope(request), exchange.receive, exchange.send)
        except TimeoutError:
            fault = f"no answer within {2 * LIMIT_S:g} s"
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            fault = traceback.format_exc()
        duration_s = time.perf_counter() - started_s
        return Answer(exchange.status, exchange.headers, bytes(exchange.body), duration_s, fault)

    async def close(self) -> None:
        pass


class _Exchange:
    """Both ends of one request, as a client that sends all and then waits."""

    def __init__(self, request: Made) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._unsent = _pieces(request)

    async def receive(self) -> Message:
        if self._unsent:
            piece = self._unsent.pop(0)
            more = bool(self._unsent)
            return {"type": "http.request", "body": piece, "more_body": more}
        await asyncio.Event().wait()  # it stays; whoever waits is cancelled
        raise AssertionError("nobody sets it")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            pairs = message.get("headers", ())
            self.headers = {name.decode().lower(): value.decode() for name, value in pairs}
        else:
            self.body += message.get("body", b"")


def _pieces(request: Made) -> list[bytes]:
    step = max(1, -(-len(request.body) // request.pieces))
    cuts = range(0, len(request.body), step)
    return [request.body[start : start + step] for start in cuts] or [b""]


def _scope(request: Made) -> dict[str, Any]:
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
