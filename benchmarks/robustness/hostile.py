"""Hostile traffic: invalid, huge, slow and vanishing clients, an open loop beside regular ones.

Each kind arrives at Poisson times with a rate of its own. No client may get a 5xx.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from benchmarks.robustness.fuzz.requests import JSON, FuzzRequest, RequestGenerator
from benchmarks.robustness.fuzz.wire import MALFORMED, plain, read_answer
from contracts.config import BUNDLED

MAX_AT_ONCE = 120  # clients in progress; above what the rates produce
MAX_BODY_BYTES = 1 << 20
MAX_CONTEXT_TOKENS = 512
MAX_ITEMS = 32
LIMIT_S = 150.0  # of an answer: the server's own limit for a request is 120 s
BYTE_EVERY_S = 0.25
SLOW_BYTES = 80
READ_S = 2.0
UNREAD_S = 15.0
IDLE_S = 90.0
STRANGER_S = 20.0
LONG = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}
WORDS = ("message", "review", "free", "prize", "card", "bank", "late", "coffee", "bad", "now")

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Kind(NamedTuple):
    """visit: one client from arrival to end; returns its outcome, with the prefix "!" if it is a
    failure."""

    name: str
    per_s: float
    visit: Callable[[random.Random], Coroutine[Any, Any, str]]


class HostileTraffic:
    """Clients of one server at host:port. ports, unix: sockets on which its ranks listen.
    outcomes: counts by kind."""

    def __init__(
        self,
        address: tuple[str, int],
        generator: RequestGenerator,
        ports: list[int],
        unix: list[str],
    ) -> None:
        self._address, self._generator, self._ports, self._unix = address, generator, ports, unix
        self._number = 0
        self._in_progress: set[asyncio.Task[None]] = set()
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[str] = []

    def kinds(self, rate: float) -> list[Kind]:
        """rate: mutated requests per second; the other kinds follow it."""
        return [
            Kind("bad", rate, self.bad),
            Kind("malformed", rate / 4, self.malformed),
            Kind("huge", rate / 100, self.huge),
            Kind("too huge", rate / 20, self.too_huge),
            Kind("slow", rate / 20, self.slow),
            Kind("unread", rate / 60, self.unread),
            Kind("vanishing", rate / 3, self.vanishing),
            Kind("idle", rate / 10, self.idle),
            *([Kind("stranger", rate / 6, self.stranger)] if self._ports or self._unix else []),
        ]

    async def run(self, rate: float, seed: int) -> None:
        """Run until cancelled, then cancel the clients in progress."""
        try:
            await asyncio.gather(*(self._arrivals(kind, seed) for kind in self.kinds(rate)))
        finally:
            for task in self._in_progress:
                task.cancel()

    async def _arrivals(self, kind: Kind, seed: int) -> None:
        dice = random.Random(f"{seed} {kind.name}")
        at_s = time.monotonic()
        while True:
            at_s += dice.expovariate(kind.per_s)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            if len(self._in_progress) < MAX_AT_ONCE:
                task = asyncio.create_task(self._visit(kind, random.Random(dice.random())))
                self._in_progress.add(task)
                task.add_done_callback(self._in_progress.discard)

    async def _visit(self, kind: Kind, dice: random.Random) -> None:
        try:
            outcome = await kind.visit(dice)
        except (OSError, EOFError) as error:
            outcome = type(error).__name__
        self.outcomes.setdefault(kind.name, Counter())[outcome] += 1
        if outcome.startswith("!"):
            self.failures.append(f"{kind.name}: {outcome[1:]}")

    async def bad(self, dice: random.Random) -> str:
        """Send a mutated body of the fuzzer."""
        self._number += 1
        mutated = self._generator.request(self._number)
        headers = [("content-type", JSON)]
        body = mutated.body[: MAX_BODY_BYTES + 1000]
        return await self._status_of(FuzzRequest(0, "POST", mutated.path, "", headers, body))

    async def malformed(self, dice: random.Random) -> str:
        request = request_of(*fresh(dice))
        async with self._line() as (reader, writer):
            writer.write(MALFORMED[dice.choice(sorted(MALFORMED))](request, dice))
            try:
                async with asyncio.timeout(5.0):
                    return _outcome((await read_answer(reader, "POST")).status)
            except (TimeoutError, ValueError):
                return "no answer"

    async def huge(self, dice: random.Random) -> str:
        """Send about the largest legal request."""
        texts = [_text(dice, MAX_CONTEXT_TOKENS // 2) for _ in range(MAX_ITEMS)]
        labels = [f"label {number} {dice.random()}" for number in range(24)]
        many = {"n": MAX_ITEMS, "max_tokens": 100, "ignore_eos": True}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": texts, "max_tokens": 40, "ignore_eos": True}),
            ("/v1/completions", {"prompt": "The", **many}),
            ("/v1/completions", {"prompt": texts[:4], "logprobs": 5, "echo": True}),
            ("/v1/classify", {"input": texts, "labels": labels}),
            ("/v1/score", {"query": "a", "items": texts, "label_token_ids": [*range(1000)]}),
        ]
        path, body = dice.choice(bodies)
        return await self._status_of(request_of(path, body))

    async def too_huge(self, dice: random.Random) -> str:
        """Send a request above a limit, which is rejected before it costs anything."""
        row, one = _text(dice, 100), {"labels": ["no", "yes"]}
        words = "a " * (MAX_BODY_BYTES // 2)
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": row * 2000}),
            ("/v1/completions", {"prompt": [row] * (MAX_ITEMS + 1)}),
            ("/v1/completions", {"prompt": "a", "n": 10_000}),
            ("/v1/completions", {"prompt": words}),
            ("/v1/classify", {"input": [row] * 5000, **one}),
            ("/v1/classify", {"input": "a" * 50_000, "template": "{text}" * 500, **one}),
            ("/v1/classify", {"input": "a", "labels": [f"{n} " * 900 for n in range(96)]}),
            ("/v1/score", {"query": words[:500_000], "items": "b", "label_token_ids": [1]}),
            ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1] * 5000}),
        ]
        path, body = dice.choice(bodies)
        return await self._status_of(request_of(path, body))

    async def slow(self, dice: random.Random) -> str:
        """Send a head or a body byte by byte for a while, then the rest."""
        sent = plain(request_of(*fresh(dice)))
        start = dice.choice((0, sent.index(b"\r\n\r\n") + 4))
        async with self._line() as (reader, writer):
            writer.write(sent[:start])
            for place in range(start, min(start + SLOW_BYTES, len(sent))):
                writer.write(sent[place : place + 1])
                await asyncio.sleep(BYTE_EVERY_S)
                if reader.at_eof() or writer.transport.is_closing():
                    return "sent away"
            writer.write(sent[start + SLOW_BYTES :])
            async with asyncio.timeout(LIMIT_S):
                return _outcome((await read_answer(reader, "POST")).status)

    async def unread(self, dice: random.Random) -> str:
        """Request a long stream and read nothing."""
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._address)
            await loop.sock_sendall(sock, plain(request_of("/v1/completions", LONG)))
            await asyncio.sleep(UNREAD_S)
        return "left"

    async def vanishing(self, dice: random.Random) -> str:
        """Disconnect in the head, in the body, before the first token, or in the stream."""
        path, body = ("/v1/completions", LONG) if dice.random() < 0.7 else fresh(dice)
        sent = plain(request_of(path, body))
        head = sent.index(b"\r\n\r\n") + 4
        stage = dice.choice(("head", "body", "sent", "first", "middle"))
        cut = {"head": dice.randrange(1, head), "body": dice.randrange(head, len(sent))}
        async with self._line() as (reader, writer):
            writer.write(sent[: cut.get(stage, len(sent))])
            if stage in ("first", "middle"):
                for pieces in range(1 if stage == "first" else dice.randrange(2, 30)):
                    with contextlib.suppress(TimeoutError):  # a short answer is complete
                        async with asyncio.timeout(READ_S if pieces else LIMIT_S):
                            if await reader.read(200):
                                continue
                    break
            else:
                await asyncio.sleep(dice.choice((0.0, 0.01, 0.05)))
            if dice.random() < 0.5:
                writer.transport.abort()
        return f"left in the {stage}" if stage != "sent" else "left before the first token"

    async def idle(self, dice: random.Random) -> str:
        """Stay connected and send nothing, at once or after one answer."""
        async with self._line() as (reader, writer):
            if dice.random() < 0.5:
                writer.write(b"GET /health HTTP/1.1\r\nhost: tandem\r\n\r\n")
                status = (await read_answer(reader, "GET")).status
                if status not in (200, 503):  # 503: ranks are in recovery
                    return f"!/health was {status}"
            try:
                async with asyncio.timeout(IDLE_S):
                    await reader.read(1)
                return "sent away"
            except TimeoutError:
                return "stayed"

    async def stranger(self, dice: random.Random) -> str:
        """Connect to a socket that is for ranks and ingresses."""
        try:
            if self._unix and dice.random() < 0.4:
                name = "\0" + dice.choice(self._unix)[1:]
                reader, writer = await asyncio.open_unix_connection(name)
            else:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", dice.choice(self._ports)
                )
        except OSError as error:
            return type(error).__name__
        async with _closing((reader, writer)):
            kind = dice.choice(("nothing", "noise", "a large frame", "http"))
            noise = dice.randbytes(dice.choice((1, 16, 200, 5000)))
            sent = {
                "nothing": b"",
                "noise": noise,
                "a large frame": b"\xff\xff\xff\x7f" + noise,
                "http": b"GET / HTTP/1.1\r\nhost: rank\r\n\r\n",
            }
            writer.write(sent[kind])
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(STRANGER_S):
                    while await reader.read(1000):
                        pass
                return "sent away"
        return "stayed"

    async def _status_of(self, request: FuzzRequest) -> str:
        try:
            return _outcome((await self._send(request, LIMIT_S)).status)
        except TimeoutError:
            return f"!no answer of {request.path} within {LIMIT_S:g} s"

    async def _send(self, request: FuzzRequest, limit_s: float) -> Any:
        async with self._line() as (reader, writer), asyncio.timeout(limit_s):
            writer.write(plain(request))
            return await read_answer(reader, request.method)

    @contextlib.asynccontextmanager
    async def _line(self) -> AsyncIterator[Line]:
        line = await asyncio.open_connection(*self._address)
        async with _closing(line):
            yield line


@contextlib.asynccontextmanager
async def _closing(line: Line) -> AsyncIterator[Line]:
    try:
        yield line
    finally:
        line[1].close()


def request_of(path: str, body: dict[str, Any]) -> FuzzRequest:
    named = {"model": BUNDLED, **body}
    return FuzzRequest(0, "POST", path, "", [("content-type", JSON)], msgspec.json.encode(named))


def fresh(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a request with new text; its blocks evict others from the cache."""
    text = _text(dice, dice.randrange(5, 150))
    if dice.random() < 0.4:
        labels = {"labels": ["no", "yes"], "template": "Message: {text}\nSpam:"}
        return "/v1/classify", {"input": text, **labels}
    body = {"max_tokens": dice.randrange(1, 16), "stream": dice.random() < 0.5}
    if dice.random() < 0.5:
        return "/v1/completions", {"prompt": text, **body}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}


def _outcome(status: int) -> str:
    return f"!status {status}" if status >= 500 else str(status)


def _text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))
