"""The API on a real port with fake ranks on real sockets, all on one background event loop."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
import openai

from actors.channels.handshake import Identity
from cluster.batch.service import Batches
from cluster.batch.store import Store
from cluster.classification.classify import ClassifyTask, TokenizedRow, tokenize_rows
from cluster.http.app import App, build_app
from cluster.http.row_client import RowClient
from cluster.http.schemas import ModelInfo
from cluster.http.server import HttpServer
from cluster.http.spans import RequestTracer
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.rank_client import RankClient, RankClientConfig
from cluster.routing.rank_set import RoutingConfig
from contracts.config import BatchConfig, HttpConfig, LimitsConfig, LogConfig, TandemConfig
from contracts.errors import NotReadyError, RequestError
from contracts.messages import Submit
from contracts.ranks import RankStatus
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import ClockOffset, TraceResponse
from models.text.tokenizer import Tokenizer
from tests.support.fake_rank import TOKEN, FakeRank
from tests.support.tiny_tokenizer import EOS

Result = TypeVar("Result")
MODEL = "tiny"
CONTEXT_TOKENS = 256
TIMEOUT_S = 20.0
ME = Identity(name="ingress-0", token=TOKEN, epoch=None)
QUICK = RankClientConfig(heartbeat_timeout_s=0.6, check_every_s=0.05, max_backoff_s=0.05)


def refused(response: httpx.Response, status: int, param: str | None, *parts: str) -> Any:
    """Return the error, whose message is one line with each of `parts`."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]
    for part in parts:
        assert part in error["message"]
    return error


class RunningRank(NamedTuple):
    """A real rank for `serve_api`."""

    name: str
    address: str

    async def listen(self) -> str:
        return self.address

    async def close(self) -> None: ...


class Loop:
    """An event loop in a thread."""

    def __init__(
        self, make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ) -> None:
        self._loop = make()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def start(self, work: Coroutine[Any, Any, object]) -> Future[object]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Run `function` on the loop and wait for it."""
        done = threading.Event()

        def called() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(called)
        assert done.wait(TIMEOUT_S)

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Api:
    """A running server, clients for it, and the fake ranks behind it."""

    def __init__(self, loop: Loop, url: str, ranks: Sequence[FakeRank], tokenizer: Tokenizer):
        self.loop = loop
        self.url = url
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S
        )
        self.backend: PipelineBackend
        self.app: App
        self.batches: Batches | None = None
        self.eos: list[int]
        self.folder: Path

    @property
    def rank(self) -> FakeRank:
        return self.ranks[0]

    def wait_ready(self) -> None:
        self.loop.run(self.backend.wait_ready())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Evaluated at every change of rank 0's client."""
        client = self.backend.clients[0]
        self.loop.run(client.wait_until(lambda _: condition()))

    def connect(self) -> socket.socket:
        """Return a connection without a client's protocol."""
        port = int(self.url.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request from the loop, so that it can keep waiting."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await client.send(request)

    def start(
        self, path: str, headers: dict[str, str] | None = None, **body: object
    ) -> Future[object]:
        """Send a request from the loop, without waiting for its answer."""
        request = self.http.build_request(
            "POST", path, json={"model": MODEL, **body}, headers=headers
        )
        return self.loop.start(self.send(request))

    def received(self) -> list[Submit]:
        """Return what rank 0 has received since the last call."""
        return [self.rank.submits.get() for _ in range(self.rank.submits.qsize())]

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def chunks(self, path: str, **body: object) -> list[dict[str, Any]]:
        """Return the events of a streamed answer."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        return [msgspec.json.decode(line) for line in lines]

    def close(self) -> None:
        self.http.close()
        self.openai.close()


class FakeLauncher:
    """A `LauncherApi` with the given methods; ranks without metrics, on this clock."""

    def __init__(self, status: Any = None, trace: Any = None, scale: Any = None) -> None:
        self.status = status or self._no_ranks
        self.trace, self.scale = trace or self._absent, scale or self._absent

    async def _absent(self, _: object) -> Any:
        raise NotReadyError("this launcher cannot do that")

    async def _no_ranks(self) -> list[RankStatus]:
        return []

    async def metrics(self) -> str:
        return ""

    async def offset(self) -> ClockOffset:
        return ClockOffset(offset_ms=0.0, uncertainty_ms=0.5, is_shared=True)


@contextlib.contextmanager
def serve_api(
    folder: Path,
    ranks: Sequence[FakeRank] | None = None,
    http: HttpConfig | None = None,
    *,
    eos_text: str = EOS,
    config: LimitsConfig | None = None,
    fetch_status: Callable[[], Awaitable[list[RankStatus]]] | None = None,
    trace: Callable[[float], Awaitable[TraceResponse]] | None = None,
    scale: Callable[[ScaleTarget | None], Awaitable[ScaleState]] | None = None,
    logs_prompts: bool = False,
    tracer: RequestTracer | None = None,
    storage: Path | None = None,
    storage_url: str | None = None,
    batch: BatchConfig = BatchConfig(),  # noqa: B008
    **limits: Any,
) -> Iterator[Api]:
    """Serve the API in front of `ranks`, by default one that generates three tokens.

    config: section `limits`.
    fetch_status, trace, scale: methods of a launcher.
    logs_prompts: log.prompts. tracer: see `build_app`.
    storage, storage_url, batch: local folder, filesystem and settings of files and batches.
    limits: fields of RoutingConfig.
    """
    served: Sequence[FakeRank] = [FakeRank()] if ranks is None else ranks
    tokenizer = Tokenizer.load(folder)
    loop = Loop()
    settings = msgspec.structs.replace(http or HttpConfig(), port=0)

    apps: list[App] = []

    async def connect() -> RowClient:
        return RowClient(apps[0])

    async def start() -> tuple[PipelineBackend, App, HttpServer, Batches | None]:
        clients = [RankClient(rank.name, await rank.listen(), ME, QUICK) for rank in served]
        backend = PipelineBackend(LeastWorkPlacer(clients, RoutingConfig(**limits)))
        backend.start()
        await backend.wait_ready()
        eos = tokenizer.encode(eos_text, add_special_tokens=False)
        model = ModelInfo(
            name=MODEL,
            max_context_tokens=CONTEXT_TOKENS,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tuple(eos),
        )
        batches = None
        if storage is not None:
            store = Store(storage_url or str(storage), storage / "work")
            batches = Batches(store, batch, MODEL, connect)
        app = build_app(
            backend,
            tokenizer,
            model,
            TandemConfig(
                http=settings,
                limits=config or LimitsConfig(),
                log=LogConfig(prompts=logs_prompts),
                batch=batch,
            ),
            launcher=FakeLauncher(fetch_status, trace, scale),
            tracer=tracer,
            batches=None if batches is None else lambda name, *of: getattr(batches, name)(*of),
        )
        apps.append(app)
        if batches is not None:
            await batches.open()
        front = HttpServer(app, settings)
        await front.start()
        return backend, app, front, batches

    backend, app, front, batches = loop.run(start())

    async def stop() -> None:
        if batches is not None:
            await batches.close()
        await front.close()
        await backend.close()
        for rank in served:
            await rank.close()

    api = Api(loop, f"http://127.0.0.1:{front.port}", served, tokenizer)
    api.backend = backend
    api.app = app
    api.batches = batches
    api.eos = tokenizer.encode(eos_text, add_special_tokens=False)
    api.folder = folder
    try:
        yield api
    finally:
        api.close()
        loop.run(stop())
        loop.close()


def tokenize_row(tokenizer: Tokenizer, task: ClassifyTask, text: str) -> TokenizedRow:
    """Tokenize one row, or raise its error."""
    (row,) = tokenize_rows(tokenizer, [(text, task)])
    if isinstance(row, RequestError):
        raise row
    return row
