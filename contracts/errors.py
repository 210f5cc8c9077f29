"""One error tree. Every error has a code, says whether trying again may help, and maps to one HTTP
status. A message names the field, the numbers with their unit, and what to change.

Exceptions take positional arguments only, so that they pickle across Ray actors.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all errors that Tandem raises on purpose."""

    code = "internal_error"
    status = 500
    retryable = False

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code

    def __str__(self) -> str:
        return self.message


class ConfigError(TandemError):
    """The configuration cannot be used: a key, a type, a range."""

    code = "config_error"
    status = 400


class CheckpointError(TandemError):
    """A model folder cannot be loaded: missing, truncated, wrong shape, unsupported."""

    code = "checkpoint_error"
    status = 400


class ResourceError(TandemError):
    """The machine or the Ray cluster lacks what the configuration asks for."""

    code = "resource_error"
    status = 503


class LaunchError(TandemError):
    """The cluster did not come up."""

    code = "launch_error"
    status = 503


class JobError(TandemError):
    """A bulk job cannot go on; what it has done is kept."""

    code = "job_error"


class RequestError(TandemError):
    """A request is wrong. Arguments: message, the field it is about (or None)."""

    code = "invalid_value"
    status = 400

    @property
    def param(self) -> str | None:
        return self.args[1] if len(self.args) > 1 else None


class UnauthorizedError(RequestError):
    code = "invalid_api_key"
    status = 401


class ForbiddenError(RequestError):
    """The key is valid, and not for this."""

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
    """What the request would make (text, tokens, passes, answer) is beyond a bound."""

    code = "request_too_costly"
    status = 413


class OverloadError(TandemError):
    """Refused at the door: queues are full. Arguments: message, seconds to wait."""

    code = "overloaded"
    status = 429
    retryable = True

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
    retryable = True


class HandedOverError(NotReadyError):
    """The rank leaves: another one goes on with the request, which has not failed."""

    code = "handed_over"


class RequestTimeoutError(TandemError):
    """A request ran longer than its limit."""

    code = "timeout"
    status = 504
    retryable = True


class RankError(TandemError):
    """A rank answered a request with an error. Arguments: message, code, HTTP status."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message, code, status)
        self.code = code
        self.status = status
        self.retryable = status in (429, 503, 504)


class ChannelError(TandemError):
    """A channel could not be set up or used."""

    code = "channel_error"
    status = 503
    retryable = True


class PeerError(ChannelError):
    """A named peer is lost. Arguments: message, the peer's name."""

    code = "peer_lost"

    @property
    def peer(self) -> str:
        return str(self.args[1])


class PeerDeadError(PeerError):
    """The peer's process is gone (its connection closed)."""

    code = "peer_dead"


class PeerHungError(PeerError):
    """The peer's process exists but has been silent for longer than the limit."""

    code = "peer_hung"


class RepairTimeoutError(ChannelError):
    """A rank is lost, and nobody was in its place in time."""

    code = "peer_lost"


class HandshakeError(ChannelError):
    """A connection did not prove that it belongs to this cluster and epoch."""

    code = "handshake_refused"


class HandshakeBrokenError(HandshakeError):
    """The connection ended, or nothing came in time, before the other side had proven itself. It
    has not refused us: it may be dialled again."""

    code = "handshake_broken"
