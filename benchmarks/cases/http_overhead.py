"""What the ingress adds to a request that could go straight to the attention rank.

    python -m benchmarks http_overhead

One attention and one expert rank behind the ingress of `tandem serve`, without a prefix cache: both
ways do the same work. One request at a time, the two ways in turn; the overhead is that of a pair.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.http_line import HttpLine
from benchmarks.support.pinned_batches import bench_client
from benchmarks.support.rank_stream import open_stream
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from cluster.routing.rank_client import RankClient
from cluster.serving.server import RunningServer, serving
from contracts.config import BUNDLED
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.requests import Sampling
from models.text.tokenizer import Tokenizer
from tests.support.tokenization import continuations

TEXT = "WINNER! Claim your free 1000 pound prize now, call before midnight and quote your code."
PROMPT = f"Message: {TEXT}\nSpam:"
LABELS = (" no", " yes")
CHAT = [{"role": "user", "content": f"Is this message spam?\n{TEXT}"}]
CHAT_TOKENS = 24
STREAM_SHARE = 4  # a chat takes longer: one for so many other requests
QUANTILES = (50, 90, 99)
WAYS = ("direct", "http")


class Timing(msgspec.Struct, frozen=True):
    """Seconds from sending to the first and to the last arrival."""

    first_s: float
    last_s: float

    @property
    def per_token_s(self) -> float:
        return (self.last_s - self.first_s) / (CHAT_TOKENS - 1)


class Request(msgspec.Struct, frozen=True):
    """One unit of work, as an HTTP request and as the message that the ingress sends."""

    name: str
    path: str
    body: dict[str, Any]
    submit: Submit
    streams: bool = False


def requests_of(tokenizer: Tokenizer) -> list[Request]:
    prompt_ids, label_ids = continuations(tokenizer, PROMPT, LABELS)
    chat_ids = tokenizer.encode_chat(CHAT)
    greedy = {"model": BUNDLED, "temperature": 0, "ignore_eos": True}
    one = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    many = msgspec.structs.replace(one, max_tokens=CHAT_TOKENS)
    candidates = [ids[0] for ids in label_ids]
    classify = {"model": BUNDLED, "input": PROMPT, "labels": list(LABELS)}
    return [
        Request(
            "classify",
            "/v1/classify",
            classify,
            Submit(request_id=0, token_ids=prompt_ids, sampling=None, candidates=candidates),
        ),
        Request(
            "completion, 1 token",
            "/v1/completions",
            {**greedy, "prompt": PROMPT, "max_tokens": 1},
            Submit(request_id=0, token_ids=prompt_ids, sampling=one),
        ),
        Request(
            "chat, streamed",
            "/v1/chat/completions",
            {**greedy, "messages": CHAT, "max_tokens": CHAT_TOKENS, "stream": True},
            Submit(request_id=0, token_ids=chat_ids, sampling=many),
            streams=True,
        ),
    ]


class Bench:
    """Runs requests either way, on reused connections."""

    def __init__(self, client: RankClient, host: str, port: int) -> None:
        self._client = client
        self._address = host, port
        self._lines: list[HttpLine] = []

    async def run(self, case: Request, way: str) -> Timing:
        return await (self._direct(case) if way == "direct" else self._http(case))

    async def _direct(self, case: Request) -> Timing:
        started_s = time.perf_counter()
        stream = await open_stream(self._client, case.submit)
        first_s = 0.0
        while batch := await stream.next_batch():
            last_s = time.perf_counter()
            first_s = first_s or last_s
            if isinstance(batch[-1], Failed):
                raise RuntimeError(batch[-1].message)
        return Timing(first_s - started_s, last_s - started_s)

    async def _http(self, case: Request) -> Timing:
        self._lines = [line for line in self._lines if not line.is_closed]
        line = self._lines.pop() if self._lines else await HttpLine.open(*self._address)
        body = msgspec.json.encode(case.body)
        started_s = time.perf_counter()
        if not case.streams:
            await line.post(case.path, body)
            first_s = last_s = time.perf_counter()
        else:
            arrivals = [at_s async for at_s, _ in line.stream(case.path, body)]
            first_s, last_s = arrivals[0], arrivals[-1]
        self._lines.append(line)
        return Timing(first_s - started_s, last_s - started_s)

    async def check(self, case: Request) -> None:
        """Raises RuntimeError unless HTTP and rank count the same tokens for the case."""
        line = await HttpLine.open(*self._address)
        plain = {key: value for key, value in case.body.items() if key != "stream"}
        usage = msgspec.json.decode(await line.post(case.path, msgspec.json.encode(plain)))["usage"]
        line.close()
        wanted = case.submit.sampling.max_tokens if case.submit.sampling else 0
        got = usage["prompt_tokens"], usage["completion_tokens"]
        if got != (len(case.submit.token_ids), wanted):
            raise RuntimeError(f"{case.name}: {got} tokens over HTTP, not those of the submit")

    def close(self) -> None:
        for line in self._lines:
            line.close()


Timings = dict[str, list[Timing]]


async def closed_loop(bench: Bench, case: Request, pairs: int) -> Timings:
    timings: Timings = {way: [] for way in WAYS}
    for number in range(pairs):
        for way in WAYS if number % 2 else reversed(WAYS):
            timings[way].append(await bench.run(case, way))
    return timings


async def _measure(
    served: RunningServer, port: int, options: argparse.Namespace
) -> dict[str, Timings]:
    """Return timings by case and way."""
    ((name, address),) = served.directory.client_addresses.items()
    client = await bench_client(name, address, served.directory.token)
    bench = Bench(client, "127.0.0.1", port)
    samples: dict[str, Timings] = {}
    for case in requests_of(Tokenizer.load(resolve_model_folder(BUNDLED))):
        await bench.check(case)
        pairs = options.pairs // (STREAM_SHARE if case.streams else 1)
        await closed_loop(bench, case, max(5, pairs // 10))  # warms up
        samples[case.name] = await closed_loop(bench, case, pairs)
    bench.close()
    await client.close()
    return samples


MEASURES: dict[str, Callable[[Timing], float]] = {
    "first": lambda timing: timing.first_s,
    "last": lambda timing: timing.last_s,
    "per token": lambda timing: timing.per_token_s,
}


def figures(timings: Timings) -> dict[str, Any]:
    """Return milliseconds by measure: medians of both ways, and quantiles of the overhead."""
    streams = any(timing.last_s > timing.first_s for timing in timings["http"])
    found: dict[str, Any] = {}
    for measure in MEASURES if streams else ["first"]:
        values = {way: [1e3 * MEASURES[measure](t) for t in timings[way]] for way in WAYS}
        pairs = zip(values["http"], values["direct"], strict=True)
        differences = [http - direct for http, direct in pairs]
        overhead = {f"p{q}": quantile(differences, q) for q in QUANTILES}
        medians = {way: statistics.median(values[way]) for way in WAYS}
        found[measure] = {"median_ms": medians, "overhead_ms": overhead}
    return found


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(options: argparse.Namespace) -> Measured:
    port = free_port()
    config = load_config(None, [f"http.port={port}", "kv.prefix_cache=false"])
    with serving(config) as served:
        samples = asyncio.run(_measure(served, port, options))
    summary = {"closed": {case: figures(timings) for case, timings in samples.items()}}
    return Measured({"closed": samples}, summary, {"chat_tokens": CHAT_TOKENS})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{request}, {measure}",
            *(f"{value:.2f}" for value in row["median_ms"].values()),
            *(f"{value:.2f}" for value in row["overhead_ms"].values()),
        ]
        for request, by_measure in summary["closed"].items()
        for measure, row in by_measure.items()
    ]
    overheads = [f"overhead p{q}" for q in QUANTILES]
    return [Table("Closed loop, ms", ["request, token", *WAYS, *overheads], rows)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=200, help="requests per case")


CASE = documented_case(__doc__, "HTTP overhead", measure, tables, add_options)
