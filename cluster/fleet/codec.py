"""Configuration, directory and traces as bytes. Kept out of modules with Serve deployments:
module-level msgspec codecs there cannot be pickled."""

from __future__ import annotations

import msgspec

import contracts.errors
from contracts.config import TandemConfig
from contracts.errors import LaunchError, TandemError
from contracts.ranks import RankReady
from contracts.scaling import ScaleState, ScaleTarget
from contracts.traces import TraceResponse


class Directory(msgspec.Struct, frozen=True, kw_only=True, tag="directory"):
    """Where attention ranks and prefill workers take requests, and the token they want."""

    client_addresses: dict[str, str]
    prefill_addresses: dict[str, str]
    token: bytes
    backend: str
    epoch: int
    ranks: list[RankReady]


class ScrapeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A process. address: "host:port/path". group, rank, node: labels of all that it exports."""

    address: str
    group: str
    rank: str
    node: str


class LaunchFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Why there is no directory. A value, since Serve logs a traceback for what is raised."""

    error: str
    message: str


# Made here: where two threads make the first one of a type at once, msgspec crashes.
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
    """The error, to be raised again."""
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
    """Raises the TandemError that `failure` is, if it is one."""
    if failure:
        raise decode_failure(failure)
    return _decode_scale(body)


def decode_directory(body: bytes) -> Directory:
    """Raises the TandemError that kept the ranks from coming up."""
    answer = _decode_directory(body)
    if isinstance(answer, Directory):
        return answer
    raise _error_of(answer)


def _error_of(failure: LaunchFailure) -> TandemError:
    kind = getattr(contracts.errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, TandemError):
        return kind(failure.message)
    return LaunchError(failure.message)
