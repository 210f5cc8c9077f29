"""Error classes. Each has a code, an HTTP status, and whether a retry may succeed.

A message names the field, the numbers with their unit, and the remedy. Exceptions take positional
arguments only, so that they can be pickled across Ray actors.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class TandemError(Exception):
    """Base class of all errors that Tandem raises on purpose."""

    code = "internal_error"
    status = 500

    @property
    def retryable(self) -> bool:
        return self.status in (429, 503, 504)

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code

    def __str__(self) -> str:
        return self.message


class ConfigError(TandemError):
    """The configuration is invalid: a key, a type, a range."""

    code = "config_error"
    status = 400


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise ConfigError if the block cannot write the file or folder that the option names."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


class CheckpointError(TandemError):
    """A model folder cannot be loaded: missing, truncated, wrong shape, unsupported."""

    code = "checkpoint_error"
    status = 400


class ResourceError(TandemError):
    """The machine or the Ray cluster lacks resources that the configuration requires."""

    code = "resource_error"
    status = 503


class LaunchError(TandemError):
    code = "launch_error"
    status = 503


class JobError(TandemError):
    """A bulk job cannot continue; its results so far are kept."""

    code = "job_error"


class RequestError(TandemError):
    """A request is invalid. Arguments: message, name of the field (or None)."""

    code = "invalid_value"
    status = 400

    @property
    def param(self) -> str | None:
        return self.args[1] if len(self.args) > 1 else None


class UnauthorizedError(RequestError):
    code = "invalid_api_key"
    status = 401


class ForbiddenError(RequestError):
    """The key is valid but lacks the permission."""

    code = "permission_denied"
    status = 403


class UnknownModelError(RequestError):
    code = "model_not_found"
    status = 404


class TooLongError(RequestError):
    """The prompt (or the body) is larger than the limit."""

    code = "context_length_exceeded"
    status = 413


class TooCostlyError(RequestError):
    """The size of the request (text, tokens, passes, response) exceeds a limit."""

    code = "request_too_costly"
    status = 413


class OverloadError(TandemError):
    """A request is rejected because queues are full. Arguments: message, seconds to wait."""

    code = "overloaded"
    status = 429

    @property
    def retry_after_s(self) -> float:
        return float(self.args[1]) if len(self.args) > 1 else 1.0


class SamplingError(TandemError):
    """A sequence's next token, or its scores, cannot be read from the model's logits."""

    code = "sampling_failed"


class NotFiniteError(SamplingError):
    """Logits that are NaN or infinite."""


class ClientGoneError(TandemError):
    code = "client_closed_request"
    status = 499


class NotReadyError(TandemError):
    code = "not_ready"
    status = 503


class HandedOverError(NotReadyError):
    """The rank is draining; another rank continues the request, which has not failed."""

    code = "handed_over"


class RequestTimeoutError(TandemError):
    code = "timeout"
    status = 504


class RankError(TandemError):
    """A rank answered a request with an error. Arguments: message, code, HTTP status."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message, code, status)
        self.code = code
        self.status = status


class ChannelError(TandemError):
    """A channel could not be set up or used."""

    code = "channel_error"
    status = 503


class PeerError(ChannelError):
    """A peer is lost. Arguments: message, name of the peer."""

    code = "peer_lost"

    @property
    def peer(self) -> str:
        return str(self.args[1])


class PeerDeadError(PeerError):
    """The peer's process has exited; its connection is closed."""

    code = "peer_dead"


class PeerHungError(PeerError):
    """The peer's process exists but sent no heartbeat within the limit."""

    code = "peer_hung"


class RecoveryTimeoutError(ChannelError):
    """A rank is lost and was not replaced in time."""

    code = "peer_lost"


class HandshakeError(ChannelError):
    """A connection did not prove that it belongs to this cluster and epoch."""

    code = "handshake_refused"


class HandshakeBrokenError(HandshakeError):
    """The connection ended or timed out before the handshake completed; it may be retried."""

    code = "handshake_broken"


def first_error(error: BaseException) -> BaseException:
    """Return the first error in a group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
