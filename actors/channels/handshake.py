"""Mutual proof that both ends of a new connection hold the cluster's token.

      initiator                                  acceptor
                 <──── Challenge(acceptor_nonce)
      Hello(name, to, epoch, purpose, extra, nonce, proof) ────>
                 <──── Welcome(name, extra, proof)   or   Refused(reason)

Each proof is HMAC-SHA256 under the token over both nonces and all previous messages, with the
side's own label, so it cannot be replayed or reflected. A stranger learns one random nonce. The
handshake authenticates the connection; it does not encrypt what follows.

Frames are those of contracts/messages.py, each one msgpack map. `_initiator` and `_acceptor` are
generators that yield bytes to send or a number of bytes to receive; they serve blocking sockets and
asyncio streams.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Generator

import msgspec

from contracts.clock import monotonic_s
from contracts.errors import HandshakeBrokenError, HandshakeError
from contracts.messages import FRAME_ERRORS, PREFIX_BYTES, encode_frame, frame_size

PROTOCOL = 1
NONCE_BYTES = 32
MAX_FRAME_BYTES = 4096
_CLOSED = "the other side closed the connection during the handshake"
_BROKE = "the connection broke during the handshake"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Name, token and epoch that a process authenticates with.

    epoch None: the connection is not bound to an epoch, and both sides must pass None. `answer`
    judges whether a peer's epoch is acceptable.
    """

    name: str
    token: bytes
    epoch: int | None


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated peer and the data it sent."""

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
_decode = msgspec.msgpack.Decoder(_Message).decode

_Steps = Generator[bytes | int, bytes, Remote]
AcceptHandler = Callable[[Remote], bytes]  # returns the acceptor's extra or raises HandshakeError


def new_token() -> bytes:
    """Return a random cluster token."""
    return secrets.token_bytes(32)


def initiate(
    sock: socket.socket,
    me: Identity,
    *,
    purpose: str,
    to: str | None,
    extra: bytes = b"",
    deadline_s: float,
) -> Remote:
    """Authenticate the acceptor, which must be named `to` (None: any). Raises HandshakeError."""
    return _run_blocking(sock, _initiator(me, purpose=purpose, to=to, extra=extra), deadline_s)


def accept(
    sock: socket.socket,
    me: Identity,
    *,
    answer: AcceptHandler | None = None,
    deadline_s: float,
    first_byte_s: float | None = None,
) -> Remote:
    """Authenticate the initiator behind `sock`. Raises HandshakeError.

    answer: judges the peer. first_byte_s: limit for its first byte, within deadline_s.
    """
    return _run_blocking(sock, _acceptor(me, answer), deadline_s, first_byte_s)


async def initiate_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    me: Identity,
    *,
    purpose: str,
    to: str | None,
    deadline_s: float,
) -> Remote:
    """Run `initiate` on asyncio streams."""
    steps = _initiator(me, purpose=purpose, to=to, extra=b"")
    return await _run_async(reader, writer, steps, deadline_s)


def _initiator(me: Identity, *, purpose: str, to: str | None, extra: bytes) -> _Steps:
    challenge = yield from _receive_message()
    if not isinstance(challenge, _Challenge) or len(challenge.nonce) != NONCE_BYTES:
        raise HandshakeError("the other side is not a Tandem rank (no challenge)")
    if challenge.protocol != PROTOCOL:
        raise HandshakeError(
            f"the other side uses protocol {challenge.protocol}, this is {PROTOCOL}: "
            "run the same version everywhere"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = _Hello(me.name, to, me.epoch, purpose, extra, nonce)
    hello = msgspec.structs.replace(hello, proof=_proof(me, "initiator", challenge, hello))
    yield _frame(hello)
    reply = yield from _receive_message()
    if isinstance(reply, _Refused):
        raise HandshakeError(f"{to or 'the other side'} refused {me.name}: {reply.reason}")
    if not isinstance(reply, _Welcome):
        raise HandshakeError("the other side broke the handshake: expected a welcome")
    bare = msgspec.structs.replace(reply, proof=b"")
    if not hmac.compare_digest(reply.proof, _proof(me, "acceptor", challenge, hello, bare)):
        raise HandshakeError("the other side does not hold this cluster's token")
    if to is not None and reply.name != to:
        raise HandshakeError(f"expected to reach {to}, reached {reply.name}")
    return Remote(name=reply.name, epoch=me.epoch, purpose=purpose, extra=reply.extra)


def _acceptor(me: Identity, answer: AcceptHandler | None) -> _Steps:
    challenge = _Challenge(PROTOCOL, secrets.token_bytes(NONCE_BYTES))
    yield _frame(challenge)
    hello = yield from _receive_message()
    if not isinstance(hello, _Hello) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeError("a stranger broke the handshake: expected a hello")
    remote = Remote(name=hello.name, epoch=hello.epoch, purpose=hello.purpose, extra=hello.extra)
    try:
        _check_hello(me, challenge, hello)
        extra = answer(remote) if answer is not None else b""
    except HandshakeError as error:
        yield _frame(_Refused(error.message))
        raise
    welcome = _Welcome(me.name, extra)
    proof = _proof(me, "acceptor", challenge, hello, welcome)
    yield _frame(msgspec.structs.replace(welcome, proof=proof))
    return remote


def _check_hello(me: Identity, challenge: _Challenge, hello: _Hello) -> None:
    """Raise HandshakeError with a reason that the initiator may see."""
    bare = msgspec.structs.replace(hello, proof=b"")
    if not hmac.compare_digest(hello.proof, _proof(me, "initiator", challenge, bare)):
        raise HandshakeError("wrong token")
    if (hello.epoch is None) != (me.epoch is None):
        raise HandshakeError(f"it is at epoch {hello.epoch}, {me.name} is at epoch {me.epoch}")
    if hello.to is not None and hello.to != me.name:
        raise HandshakeError(f"it expects {hello.to}, this is {me.name}")


def _proof(me: Identity, label: str, *messages: _Message) -> bytes:
    """Return the HMAC over `label` and the messages, whose own proof is still empty."""
    return hmac.digest(me.token, msgspec.msgpack.encode((label, *messages)), "sha256")


def _frame(message: _Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise HandshakeError(
            f"a handshake message of {len(body)} bytes exceeds {MAX_FRAME_BYTES} bytes: "
            "send less in `extra`"
        )
    return encode_frame(body)


def _receive_message() -> Generator[bytes | int, bytes, _Message]:
    try:
        body = yield frame_size((yield PREFIX_BYTES), MAX_FRAME_BYTES)
        message: _Message = _decode(body)
    except FRAME_ERRORS as error:
        text = f"the other side sent something that is not a handshake ({error})"
        raise HandshakeError(text) from None
    return message


def _run_blocking(
    sock: socket.socket, steps: _Steps, deadline_s: float, first_byte_s: float | None = None
) -> Remote:
    start_s = monotonic_s()
    end_s = start_s + deadline_s
    first_s = end_s if first_byte_s is None else min(end_s, start_s + first_byte_s)
    has_received = False

    def send_bytes(data: bytes) -> bytes:
        sock.settimeout(max(end_s - monotonic_s(), 1e-3))
        sock.sendall(data)
        return b""

    def receive_bytes(size: int) -> bytes:
        nonlocal has_received
        data = b""
        while len(data) < size:
            until_s = end_s if has_received else first_s
            if monotonic_s() >= until_s:
                raise TimeoutError
            sock.settimeout(max(until_s - monotonic_s(), 1e-3))
            piece = sock.recv(size - len(data))
            if not piece:
                raise HandshakeBrokenError(_CLOSED)
            has_received = True
            data += piece
        return data

    try:
        step = next(steps)
        while True:
            step = steps.send(receive_bytes(step) if isinstance(step, int) else send_bytes(step))
    except StopIteration as done:
        return _remote(done)
    except TimeoutError:
        raise _timeout_error(deadline_s, None if has_received else first_byte_s) from None
    except OSError as error:
        raise HandshakeBrokenError(f"{_BROKE}: {error}") from None


async def _run_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: _Steps, deadline_s: float
) -> Remote:
    try:
        async with asyncio.timeout(deadline_s):
            step = next(steps)
            while True:
                if isinstance(step, int):
                    step = steps.send(await reader.readexactly(step))
                    continue
                writer.write(step)
                await writer.drain()
                step = steps.send(b"")
    except StopIteration as done:
        return _remote(done)
    except TimeoutError:
        raise _timeout_error(deadline_s, None) from None
    except asyncio.IncompleteReadError:
        raise HandshakeBrokenError(_CLOSED) from None
    except OSError as error:
        raise HandshakeBrokenError(f"{_BROKE}: {error}") from None


def _timeout_error(deadline_s: float, first_byte_s: float | None) -> HandshakeBrokenError:
    """Return the timeout error. first_byte_s: that limit, if it is the one that expired."""
    if first_byte_s is not None and first_byte_s < deadline_s:
        return HandshakeBrokenError(f"nothing was received within {first_byte_s:g} s")
    return HandshakeBrokenError(f"no handshake within {deadline_s:g} s")


def _remote(done: StopIteration) -> Remote:
    remote: Remote = done.value
    return remote
