"""An attention rank without a model: real protocol and socket, deterministic tokens."""

import asyncio
import contextlib
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from actors.channels import handshake
from actors.channels.handshake import Identity
from contracts.errors import HandshakeError
from contracts.messages import (
    Cancel,
    Event,
    Events,
    Failed,
    Finished,
    RankState,
    Scored,
    Submit,
    TokenLogprob,
    Tokens,
    ToRank,
)
from contracts.requests import Usage

TOKEN = b"a token for tests"
HEARTBEAT_S = 0.05
CACHED_TOKENS = 1

Reply = Callable[[Submit], list[int]]


def three_tokens(_: Submit) -> list[int]:
    return [60, 61, 62]


class FakeRank:
    """A fake rank. `submits` and `cancels` may be read from any thread.

    reply: returns the tokens to generate, including eos.
    per_frame: tokens per frame.
    hold_after: tokens to send before a request stalls.
    """

    def __init__(
        self, name: str = "attention-0", reply: Reply = three_tokens, *, per_frame: int = 1
    ) -> None:
        self.name = name
        self.reply = reply
        self.per_frame = per_frame
        self.hold_after: int | None = None
        self.fail_with: tuple[str, str, int] | None = None  # message, code, status
        self.hold_scores = False
        self.on_submit: Callable[[], None] | None = None
        self.silent = False
        self.process_identity = b""  # as of actors/channels/local_process.py
        self.healthy = True
        self.stuck = self.leaving = self.waits = False
        self.total_blocks = 0
        self.submits: SimpleQueue[Submit] = SimpleQueue()
        self.cancels: SimpleQueue[int] = SimpleQueue()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open: list[tuple[asyncio.StreamWriter, int]] = []  # held requests
        self._server: asyncio.Server | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    async def listen(self) -> str:
        """Listen on a free TCP port. Return the client address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Close all connections, as a dead process does. Call it on the rank's loop."""
        for writer in list(self._writers):
            writer.transport.abort()

    def drop_connections_from_thread(self) -> None:
        assert self._server is not None
        self._server.get_loop().call_soon_threadsafe(self.drop_connections)

    def leave(self, *, hands_over: bool = True) -> None:
        """Report leaving, then hand over all requests. Call it on the rank's loop."""
        self.leaving = True
        self.fail_with = (f"{self.name} leaves", "handed_over", 503)
        for writer, number in self._open:
            self.send(writer, [self._state()])
            if hands_over:
                self.send(writer, [Failed(number, "handed_over", f"{self.name} leaves", 503)])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = Identity(name=self.name, token=TOKEN, epoch=None)
        try:
            steps = handshake._acceptor(me, lambda _: self.process_identity)
            await handshake._run_async(reader, writer, steps, 5.0)
        except (HandshakeError, OSError, EOFError):
            writer.close()
            return
        self._writers.add(writer)
        self._greet(writer)
        beat = asyncio.create_task(self._beat(writer))
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                self._take(writer, self._decoder.decode(await reader.readexactly(size)))
        except (OSError, EOFError):
            pass
        finally:
            beat.cancel()
            self._writers.discard(writer)
            writer.close()

    def _greet(self, writer: asyncio.StreamWriter) -> None:
        """Send more than the state to a new client."""

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                if not self.silent:
                    self.send(writer, [self._state()])
                await asyncio.sleep(HEARTBEAT_S)

    def _state(self) -> RankState:
        healthy = self.healthy and not self.stuck
        reason = "" if healthy else "told so"
        return RankState(
            rank=self.name,
            healthy=healthy,
            reason=reason,
            stuck=self.stuck,
            leaving=self.leaving,
            waits=self.waits,
            total_blocks=self.total_blocks,
        )

    def send(self, writer: asyncio.StreamWriter, events: list[Event]) -> None:
        body = self._encoder.encode(Events(events))
        writer.write(len(body).to_bytes(4, "little") + body)

    def _take(self, writer: asyncio.StreamWriter, message: ToRank) -> None:
        if isinstance(message, Cancel):
            self.cancels.put(message.request_id)
            return
        self.submits.put(message)
        if self.hold_after is not None:
            self._open.append((writer, message.request_id))
        if self.fail_with is not None:
            text, code, status = self.fail_with
            self.send(writer, [Failed(message.request_id, code, text, status)])
        elif message.sampling is not None:
            for frame in self.generated(message):
                self.send(writer, frame)
        elif not self.hold_scores:
            self.send(writer, [scored(message)])
        if self.on_submit is not None:
            self.on_submit()

    def generated(self, submit: Submit) -> list[list[Event]]:
        assert submit.sampling is not None
        reply = self.reply(submit)
        token_ids = reply[: submit.sampling.max_tokens - submit.generated]
        sent = token_ids[: self.hold_after] if self.hold_after is not None else token_ids
        frames: list[list[Event]] = []
        for start in range(0, len(sent), self.per_frame):
            part = sent[start : start + self.per_frame]
            logprobs = None
            if submit.sampling.logprobs is not None:
                logprobs = [_logprob(token_id, submit.sampling.logprobs) for token_id in part]
            cached = CACHED_TOKENS if start == 0 and not submit.generated else None
            queued_s = 0.0 if submit.timed and cached is not None else None
            frames.append([Tokens(submit.request_id, part, logprobs, cached, queued_s)])
        if self.hold_after is None:
            reason = "stop" if len(token_ids) == len(reply) else "length"
            usage = Usage(
                prompt_tokens=submit.prompt_tokens,
                completion_tokens=submit.generated + len(token_ids),
                cached_tokens=CACHED_TOKENS,
            )
            frames.append([Finished(submit.request_id, reason, usage)])
        return frames


def token_logprob(token_id: int) -> float:
    return -0.25 - (token_id % 8) / 4


def _logprob(token_id: int, top: int) -> TokenLogprob:
    others = [(token_id + offset, token_logprob(token_id) - offset) for offset in range(top)]
    return TokenLogprob(token_logprob(token_id), others)


def scored(submit: Submit, cached_tokens: int = CACHED_TOKENS) -> Scored:
    """Return scores that depend on the token ids only."""
    usage = Usage(prompt_tokens=len(submit.token_ids), cached_tokens=cached_tokens)
    logits = logprobs = tops = None
    if submit.candidates is not None:
        logits = [token_logprob(token_id) for token_id in submit.candidates]
    if submit.score_from is not None:
        scored = submit.token_ids[submit.score_from :]
        logprobs = [token_logprob(token_id) for token_id in scored]
        if submit.score_top:
            tops = [_logprob(token_id, submit.score_top).top for token_id in scored]
    return Scored(submit.request_id, usage, logits, logits, logprobs, tops)
