"""Mutual proof that both ends of a new connection hold the cluster's token.

      initiator                                  acceptor
                 <──── Challenge(acceptor_nonce)
      Hello(name, to, epoch, purpose, extra, nonce, proof) ────>
                 <──── Welcome(name, extra, proof)   or   Refused(reason)

Each proof is HMAC-SHA256 under the token over both nonces and all that has been said, with the
side's own label, so that it cannot be replayed or reflected. A stranger learns one random nonce
and nothing else. The handshake proves who opened the connection; it does not encrypt what follows.

Frames are a 4-byte little-endian length and one msgpack map. One set of steps (`_initiator`,
`_acceptor`: generators that yield bytes to send and take the next frame) serves blocking sockets
and asyncio streams.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Generator

import msgspec

from contracts.clock import monotonic_s
from contracts.errors import HandshakeBrokenError, HandshakeError
from contracts.frames import BAD_FRAME

PROTOCOL = 1
NONCE_BYTES = 32
MAX_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<I")
_CLOSED = "the other side closed the connection during the handshake"
_BROKE = "the connection broke during the handshake"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who we are. epoch None: this connection is not bound to an epoch (both sides say None)."""

    name: str
    token: bytes
    epoch: int | None


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """Who the other side proved to be, and what it said along with it."""

    name: str
    epoch: int | None
    purpose: str
    extra: bytes


class _Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    protocol: int
    nonce: bytes


class _Hello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    to: str | None
    epoch: int | None
    purpose: str
    extra: bytes
    nonce: bytes
    proof: bytes = b""


class _Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    name: str
    extra: bytes
    proof: bytes = b""


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


_Message = _Challenge | _Hello | _Welcome | _Refused
# Yields what to send, is sent the next frame's body, returns what to send last and who it was.
_Steps = Generator[bytes, bytes, tuple[bytes, Remote]]
Answer = Callable[[Remote], bytes]  # gives the acceptor's extra, or raises HandshakeError


def initiate(
    sock: socket.socket,
    me: Identity,
    *,
    purpose: str,
    to: str | None,
    extra: bytes = b"",
    deadline_s: float,
) -> Remote:
    """The acceptor behind `sock`, which must be called `to` (None: any name).

    Raises HandshakeError. Leaves the socket's timeout at what remained of the deadline.
    """
    return _run_blocking(sock, _initiator(me, purpose=purpose, to=to, extra=extra), deadline_s)


def accept(
    sock: socket.socket,
    me: Identity,
    *,
    answer: Answer | None = None,
    deadline_s: float,
    first_byte_s: float | None = None,
) -> Remote:
    """The initiator behind `sock`. `answer` judges it. first_byte_s: by when it must have said
    something, of deadline_s. Raises HandshakeError."""
    return _run_blocking(sock, _acceptor(me, answer), deadline_s, first_byte_s)


async def initiate_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    *,
    purpose: str,
    to: str | None,
    extra: bytes = b"",
    deadline_s: float,
) -> Remote:
    """`initiate` on asyncio streams."""
    steps = _initiator(me, purpose=purpose, to=to, extra=extra)
    return await _run_async(reader, writer, steps, deadline_s)


async def accept_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    *,
    answer: Answer | None = None,
    deadline_s: float,
    first_byte_s: float | None = None,
) -> Remote:
    """`accept` on asyncio streams."""
    return await _run_async(reader, writer, _acceptor(me, answer), deadline_s, first_byte_s)


def _initiator(me: Identity, *, purpose: str, to: str | None, extra: bytes) -> _Steps:
    challenge = _decode((yield b""))
    if not isinstance(challenge, _Challenge) or len(challenge.nonce) != NONCE_BYTES:
        raise HandshakeError("the other side is not a Tandem rank (no challenge)")
    if challenge.protocol != PROTOCOL:
        raise HandshakeError(
            f"the other side speaks protocol {challenge.protocol}, this is {PROTOCOL}: "
            "run the same version everywhere"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = _Hello(me.name, to, me.epoch, purpose, extra, nonce)
    hello = msgspec.structs.replace(hello, proof=_proof(me, "initiator", challenge, hello))
    reply = _decode((yield _frame(hello)))
    if isinstance(reply, _Refused):
        raise HandshakeError(f"{to or 'the other side'} refused {me.name}: {reply.reason}")
    if not isinstance(reply, _Welcome):
        raise HandshakeError("the other side broke the handshake: expected a welcome")
    bare = msgspec.structs.replace(reply, proof=b"")
    if not hmac.compare_digest(reply.proof, _proof(me, "acceptor", challenge, hello, bare)):
        raise HandshakeError("the other side does not hold this cluster's token")
    if to is not None and reply.name != to:
        raise HandshakeError(f"expected to reach {to}, reached {reply.name}")
    return b"", Remote(name=reply.name, epoch=me.epoch, purpose=purpose, extra=reply.extra)


def _acceptor(me: Identity, answer: Answer | None) -> _Steps:
    challenge = _Challenge(PROTOCOL, secrets.token_bytes(NONCE_BYTES))
    hello = _decode((yield _frame(challenge)))
    if not isinstance(hello, _Hello) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeError("a stranger broke the handshake: expected a hello")
    bare = msgspec.structs.replace(hello, proof=b"")
    if not hmac.compare_digest(hello.proof, _proof(me, "initiator", challenge, bare)):
        raise _RefusalError("wrong token")
    if hello.epoch != me.epoch:
        raise _RefusalError(f"it is at epoch {hello.epoch}, {me.name} is at epoch {me.epoch}")
    if hello.to is not None and hello.to != me.name:
        raise _RefusalError(f"it looks for {hello.to}, this is {me.name}")
    remote = Remote(name=hello.name, epoch=hello.epoch, purpose=hello.purpose, extra=hello.extra)
    try:
        extra = answer(remote) if answer is not None else b""
    except HandshakeError as error:
        raise _RefusalError(error.message) from None
    welcome = _Welcome(me.name, extra)
    proof = _proof(me, "acceptor", challenge, hello, welcome)
    return _frame(msgspec.structs.replace(welcome, proof=proof)), remote


class _RefusalError(HandshakeError):
    """Said to the initiator before it is raised here."""


def _proof(me: Identity, label: str, *said: _Message) -> bytes:
    """HMAC over `label` and the messages; a message's own proof field is still empty."""
    return hmac.digest(me.token, msgspec.msgpack.encode((label, *said)), "sha256")


def _frame(message: _Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise HandshakeError(
            f"a handshake message of {len(body)} bytes exceeds {MAX_FRAME_BYTES} bytes: "
            "send less in `extra`"
        )
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> _Message:
    try:
        message: _Message = msgspec.msgpack.decode(body, type=_Message)
    except BAD_FRAME:
        raise HandshakeError("the other side sent something that is not a handshake") from None
    return message


def _body_bytes(prefix: bytes) -> int:
    size: int = _LENGTH.unpack(prefix)[0]
    if not 0 < size <= MAX_FRAME_BYTES:
        raise HandshakeError(f"a first frame of {size} bytes (limit {MAX_FRAME_BYTES} bytes)")
    return size


def _run_blocking(
    sock: socket.socket, steps: _Steps, deadline_s: float, first_byte_s: float | None = None
) -> Remote:
    start_s = monotonic_s()
    end_s = start_s + deadline_s
    first_s = end_s if first_byte_s is None else min(end_s, start_s + first_byte_s)
    heard = False

    def say(data: bytes) -> None:
        if data:
            sock.settimeout(max(end_s - monotonic_s(), 1e-3))
            sock.sendall(data)

    def hear(size: int) -> bytes:
        nonlocal heard
        data = b""
        while len(data) < size:
            until_s = end_s if heard else first_s
            if monotonic_s() >= until_s:
                raise TimeoutError
            sock.settimeout(max(until_s - monotonic_s(), 1e-3))
            piece = sock.recv(size - len(data))
            if not piece:
                raise HandshakeBrokenError(_CLOSED)
            heard = True
            data += piece
        return data

    try:
        out = next(steps)
        while True:
            say(out)
            body = hear(_body_bytes(hear(_LENGTH.size)))
            try:
                out = steps.send(body)
            except StopIteration as done:
                say(done.value[0])
                return _remote(done)
            except _RefusalError as error:
                say(_frame(_Refused(error.message)))
                raise
    except TimeoutError:
        raise _too_late(deadline_s, None if heard else first_byte_s) from None
    except OSError as error:
        raise HandshakeBrokenError(f"{_BROKE}: {error}") from None


async def _run_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    steps: _Steps,
    deadline_s: float,
    first_byte_s: float | None = None,
) -> Remote:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + deadline_s
    first_s = end_s if first_byte_s is None else min(end_s, loop.time() + first_byte_s)
    heard = False

    async def hear(size: int) -> bytes:
        nonlocal heard
        first = b""
        if not heard:
            async with asyncio.timeout_at(first_s):
                first = await reader.readexactly(1)
            heard = True
        return first + await reader.readexactly(size - len(first))

    async def say(data: bytes) -> None:
        if data:
            writer.write(data)
            await writer.drain()

    try:
        async with asyncio.timeout_at(end_s):
            out = next(steps)
            while True:
                await say(out)
                body = await hear(_body_bytes(await hear(_LENGTH.size)))
                try:
                    out = steps.send(body)
                except StopIteration as done:
                    await say(done.value[0])
                    return _remote(done)
                except _RefusalError as error:
                    await say(_frame(_Refused(error.message)))
                    raise
    except TimeoutError:
        raise _too_late(deadline_s, None if heard else first_byte_s) from None
    except asyncio.IncompleteReadError:
        raise HandshakeBrokenError(_CLOSED) from None
    except OSError as error:
        raise HandshakeBrokenError(f"{_BROKE}: {error}") from None


def _too_late(deadline_s: float, first_byte_s: float | None) -> HandshakeBrokenError:
    """first_byte_s: what has passed, where that is the deadline that has."""
    if first_byte_s is not None and first_byte_s < deadline_s:
        return HandshakeBrokenError(f"nothing was said within {first_byte_s:g} s")
    return HandshakeBrokenError(f"no handshake within {deadline_s:g} s")


def _remote(done: StopIteration) -> Remote:
    remote: Remote = done.value[1]
    return remote
