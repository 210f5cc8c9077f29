"""Configuration, directory and traces as bytes.

Separate from modules with Serve deployments: module-level msgspec codecs there cannot be pickled.
"""

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


encode_config = encode_trace = msgspec.json.encode
encode_directory = encode_target = encode_scale = msgspec.msgpack.encode
# At import: msgspec crashes if two threads create the first decoder of a type at once.
decode_config = msgspec.json.Decoder(TandemConfig).decode
decode_trace = msgspec.json.Decoder(TraceResponse).decode
decode_target = msgspec.msgpack.Decoder(ScrapeTarget).decode
decode_wanted = msgspec.msgpack.Decoder(ScaleTarget).decode
_decode_scale = msgspec.msgpack.Decoder(ScaleState).decode
_decode_directory = msgspec.msgpack.Decoder(Directory | LaunchFailure).decode
_decode_failure = msgspec.msgpack.Decoder(LaunchFailure).decode


def encode_failure(error: Exception) -> bytes:
    name = type(error).__name__
    if isinstance(error, TandemError):
        return msgspec.msgpack.encode(LaunchFailure(name, error.message))
    reason = " ".join(f"{name}: {error}".split())
    return msgspec.msgpack.encode(LaunchFailure(LaunchError.__name__, reason))


def decode_failure(body: bytes) -> TandemError:
    """Return the error, to be raised."""
    return _error_of(_decode_failure(body))


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
