"""The clients of a soak, one coroutine per visit. Each says what came of it; "!…" must not be.

What holds for all but the honest: whatever they do, they get no 5xx.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.fuzz.requests import Made, Maker
from benchmarks.fuzz.wire import WIRES, plain, read_answer
from benchmarks.soak import answers
from benchmarks.soak.served import KEYS, MAX_BODY_BYTES, MAX_CONTEXT_TOKENS, MAX_ITEMS
from benchmarks.soak.traffic import HonestAnswer, Kind, Tally

HONEST_LIMIT_S = 30.0
LIMIT_S = 150.0  # of any other answer: the server's own limit for a request is 120 s
BYTE_EVERY_S = 0.25
SLOW_BYTES = 80
UNREAD_S = 15.0
IDLE_S = 90.0
STRANGER_S = 20.0
LONG = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True}

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Clients:
    """Of one server at host:port. expected: what `answers.KNOWN` were answered at the start."""

    def __init__(self, address: tuple[str, int], maker: Maker, tally: Tally) -> None:
        self._address = address
        self.maker = maker
        self._tally = tally
        self.expected: list[tuple[str, dict[str, Any], Any]] = []
        self.ports: list[int] = []
        self.unix: list[str] = []
        self._number = 0

    def kinds(self, rate: float) -> list[Kind]:
        """rate: of honest requests per second. The others follow it."""
        return [
            Kind("honest", rate, self.honest),
            Kind("bad", rate, self.bad),
            Kind("odd wire", rate / 4, self.odd_wire),
            Kind("huge", rate / 100, self.huge),
            Kind("too huge", rate / 20, self.too_huge),
            Kind("slow", rate / 20, self.slow),
            Kind("unread", rate / 60, self.unread),
            Kind("vanishing", rate / 3, self.vanishing),
            Kind("idle", rate / 10, self.idle),
            Kind("no key", rate / 4, self.no_key),
            Kind("stranger", rate / 6, self.stranger),
        ]

    async def learn(self) -> list[str]:
        """Asks every known request once; those that the server does not know are left out."""
        left_out = []
        for path, body in answers.KNOWN:
            answer = await self._ask(answers.made(path, body, KEYS[0]), LIMIT_S)
            if answer.status == 200:
                self.expected.append((path, body, answers.said(answer.body)))
            else:
                left_out.append(answer.body.decode("utf-8", "replace")[:200])
        return left_out

    async def honest(self, dice: random.Random) -> str:
        """A right answer in time, or the soak has failed."""
        key = dice.choice(KEYS)
        if known := dice.random() < 0.6:
            path, body, expected = dice.choice(self.expected)
        else:
            (path, body), expected = answers.fresh(dice), None
        started_s = time.monotonic()
        try:
            answer = await self._ask(answers.made(path, body, key), HONEST_LIMIT_S)
        except TimeoutError:
            return f"!no answer of {path} within {HONEST_LIMIT_S:g} s"
        took_s = time.monotonic() - started_s
        if answer.status != 200:
            return f"!status {answer.status} of {path}: {answer.body[:300]!r}"
        try:
            said = answers.said(answer.body)
        except ValueError as error:
            return f"!{path}: {error}"
        if known and not answers.same(said, expected):
            return f"!{path} {body} was answered {said}, at the start {expected}"
        self._tally.honest.append(HonestAnswer(started_s, took_s))
        return "right" if known else "answered"

    async def bad(self, dice: random.Random) -> str:
        """Mutated bodies, as the fuzzer makes them."""
        self._number += 1
        made = self.maker.made(self._number)
        bearer = [("content-type", "application/json"), ("authorization", _bearer(dice))]
        body = made.body[: MAX_BODY_BYTES + 1000]
        return await self._told(Made(0, "POST", made.path, "", bearer, body))

    async def odd_wire(self, dice: random.Random) -> str:
        made = answers.made(*answers.fresh(dice), dice.choice(KEYS))
        async with self._line() as (reader, writer):
            writer.write(WIRES[dice.choice(sorted(WIRES))](made, dice))
            try:
                async with asyncio.timeout(5.0):
                    return _told((await read_answer(reader, "POST")).status)
            except (TimeoutError, ValueError):
                return "no answer"

    async def huge(self, dice: random.Random) -> str:
        """About the largest that is legal: rows, choices, labels, tokens."""
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
        return await self._told(answers.made(path, body, dice.choice(KEYS)))

    async def too_huge(self, dice: random.Random) -> str:
        """Above the limits, each of which must be told before it costs anything."""
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
        return await self._told(answers.made(path, body, dice.choice(KEYS)))

    async def slow(self, dice: random.Random) -> str:
        """A head or a body byte by byte, for a while, then the rest at once."""
        sent = plain(answers.made(*answers.fresh(dice), dice.choice(KEYS)))
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
                return _told((await read_answer(reader, "POST")).status)

    async def unread(self, dice: random.Random) -> str:
        """Asks for a long stream and reads nothing of it."""
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._address)
            await loop.sock_sendall(
                sock, plain(answers.made("/v1/completions", LONG, dice.choice(KEYS)))
            )
            await asyncio.sleep(UNREAD_S)
        return "left"

    async def vanishing(self, dice: random.Random) -> str:
        """Leaves in the head, in the body, before the first token, or in the stream."""
        path, body = ("/v1/completions", LONG) if dice.random() < 0.7 else answers.fresh(dice)
        sent = plain(answers.made(path, body, dice.choice(KEYS)))
        head = sent.index(b"\r\n\r\n") + 4
        stage = dice.choice(("head", "body", "sent", "first", "middle"))
        cut = {"head": dice.randrange(1, head), "body": dice.randrange(head, len(sent))}
        async with self._line() as (reader, writer):
            writer.write(sent[: cut.get(stage, len(sent))])
            if stage in ("first", "middle"):
                for _ in range(1 if stage == "first" else dice.randrange(2, 30)):
                    async with asyncio.timeout(LIMIT_S):
                        if not await reader.read(200):
                            break
            else:
                await asyncio.sleep(dice.choice((0.0, 0.01, 0.05)))
            if dice.random() < 0.5:
                writer.transport.abort()
        return f"left in the {stage}" if stage != "sent" else "left before the first token"

    async def idle(self, dice: random.Random) -> str:
        """Says nothing, or nothing more after one answer."""
        async with self._line() as (reader, writer):
            if dice.random() < 0.5:
                writer.write(b"GET /health HTTP/1.1\r\nhost: tandem\r\n\r\n")
                status = (await read_answer(reader, "GET")).status
                if status != 200:
                    return f"!/health was {status}"
            try:
                async with asyncio.timeout(IDLE_S):
                    await reader.read(1)
                return "sent away"
            except TimeoutError:
                return "stayed"

    async def no_key(self, dice: random.Random) -> str:
        path, body = answers.fresh(dice)
        if dice.random() < 0.1:
            body["prompt"] = "a" * (MAX_BODY_BYTES - 1000)
        key = dice.choice((None, "wrong", "", KEYS[0] + "x", KEYS[0][:-1]))
        told = await self._told(answers.made(path, body, key))
        return told if told == "401" else f"!{told} without a key"

    async def stranger(self, dice: random.Random) -> str:
        """On a socket where only ranks and ingresses belong."""
        try:
            if self.unix and dice.random() < 0.4:
                name = "\0" + dice.choice(self.unix)[1:]
                reader, writer = await asyncio.open_unix_connection(name)
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", dice.choice(self.ports))
        except OSError as error:
            return type(error).__name__
        async with _closing((reader, writer)):
            kind = dice.choice(("nothing", "noise", "a large frame", "http"))
            noise = dice.randbytes(dice.choice((1, 16, 200, 5000)))
            said = {
                "nothing": b"",
                "noise": noise,
                "a large frame": b"\xff\xff\xff\x7f" + noise,
                "http": b"GET / HTTP/1.1\r\nhost: rank\r\n\r\n",
            }
            writer.write(said[kind])
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(STRANGER_S):
                    while await reader.read(1000):
                        pass
                return "sent away"
        return "stayed"

    async def _told(self, made: Made) -> str:
        try:
            return _told((await self._ask(made, LIMIT_S)).status)
        except TimeoutError:
            return f"!no answer of {made.path} within {LIMIT_S:g} s"

    async def _ask(self, made: Made, limit_s: float) -> Any:
        async with self._line() as (reader, writer), asyncio.timeout(limit_s):
            writer.write(plain(made))
            return await read_answer(reader, made.method)

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


def _bearer(dice: random.Random) -> str:
    return f"Bearer {dice.choice(KEYS)}"


def _told(status: int) -> str:
    return f"!status {status}" if status >= 500 else str(status)


def _text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(answers.WORDS, k=words))
