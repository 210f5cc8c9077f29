"""Configuration, directory and traces as bytes.

Separate from modules with Serve deployments: module-level msgspec codecs there cannot be pickled.
"""

from __future__ import annotations

import msgspec

import contracts.errors
from contracts.config import TandemConfig
from contracts.errors import LaunchError, TandemError
from contracts.ranks import RankReady
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import TraceResponse


class Directory(msgspec.Struct, frozen=True, kw_only=True, tag="directory"):
    """Client addresses of attention ranks and prefill workers, and the token they require."""

    client_addresses: dict[str, str]
    prefill_addresses: dict[str, str]
    token: bytes
    backend: str
    epoch: int
    ranks: list[RankReady]


class ScrapeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A process with metrics. address: "host:port/path". group, rank, node: its labels."""

    address: str
    group: str
    rank: str
    node: str


class LaunchFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Reason of a failed launch. A value, because Serve logs a traceback for exceptions."""

    error: str
    message: str


# At import: msgspec crashes if two threads create the first decoder of a type at once.
_decode_config = msgspec.json.Decoder(TandemConfig).decode
_decode_directory = msgspec.msgpack.Decoder(Directory | LaunchFailure).decode
_decode_failure = msgspec.msgpack.Decoder(LaunchFailure).decode
_decode_target = msgspec.msgpack.Decoder(ScrapeTarget).decode
_decode_trace = msgspec.json.Decoder(TraceResponse).decode
_decode_wanted = msgspec.msgpack.Decoder(ScaleTarget).decode
_decode_scale = msgspec.msgpack.Decoder(ScaleState).decode


def encode_config(config: TandemConfig) -> bytes:
    return msgspec.json.encode(config)


def decode_config(body: bytes) -> TandemConfig:
    return _decode_config(body)


def encode_directory(directory: Directory) -> bytes:
    return msgspec.msgpack.encode(directory)


def encode_target(target: ScrapeTarget) -> bytes:
    return msgspec.msgpack.encode(target)


def decode_target(body: bytes) -> ScrapeTarget:
    return _decode_target(body)


def encode_failure(error: Exception) -> bytes:
    name = type(error).__name__
    if isinstance(error, TandemError):
        return msgspec.msgpack.encode(LaunchFailure(name, error.message))
    reason = " ".join(f"{name}: {error}".split())
    return msgspec.msgpack.encode(LaunchFailure(LaunchError.__name__, reason))


def decode_failure(body: bytes) -> TandemError:
    """Return the error, to be raised."""
    return _error_of(_decode_failure(body))


def encode_trace(answer: TraceResponse) -> bytes:
    return msgspec.json.encode(answer)


def decode_trace(body: bytes) -> TraceResponse:
    return _decode_trace(body)


def encode_scale(answer: ScaleTarget | ScaleState) -> bytes:
    return msgspec.msgpack.encode(answer)


def decode_wanted(body: bytes) -> ScaleTarget:
    return _decode_wanted(body)


def decode_scale(body: bytes, failure: bytes) -> ScaleState:
    """Decode a scale state. Raises the TandemError of a failure."""
    if failure:
        raise decode_failure(failure)
    return _decode_scale(body)


def decode_directory(body: bytes) -> Directory:
    """Decode a directory. Raises the TandemError of a failed launch."""
    answer = _decode_directory(body)
    if isinstance(answer, Directory):
        return answer
    raise _error_of(answer)


def _error_of(failure: LaunchFailure) -> TandemError:
    kind = getattr(contracts.errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, TandemError):
        return kind(failure.message)
    return LaunchError(failure.message)
