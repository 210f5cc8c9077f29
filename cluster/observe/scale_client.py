"""Client of `tandem scale`: requests new numbers of ranks and follows the change."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.observe.server_client import Server, decode_answer, error_message, send_request
from contracts.errors import ConfigError, LaunchError
from contracts.scaling import ScaleState, ScaleTarget, format_counts

_REQUEST_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 1 << 20
_POLL_S: Final = 0.5
_MAX_SILENCE_S: Final = 60.0  # without an answer, while a launcher is replaced


def start_scale(server: Server, requested: ScaleTarget) -> ScaleState:
    """Start the change. Raises ConfigError if the server refuses or does not answer."""
    return _request_scale(server, "POST", requested)


def follow_scale(
    server: Server, started: ScaleState, report: Callable[[str], None], within_s: float
) -> ScaleState:
    """Report each step until the change has ended.

    Raises LaunchError if the change failed, or has not ended in time: it continues in the server.
    """
    end_s, last_reply_s = time.monotonic() + within_s, time.monotonic()
    num_reported, state = 0, started
    while True:
        for step in state.steps[num_reported:]:
            report(step)
        num_reported = len(state.steps)
        if state.state == "failed":
            raise LaunchError(f"{state.reason}; current ranks: {format_counts(state.ranks)}")
        if state.state != "running":
            return state
        if time.monotonic() > end_s:
            raise LaunchError(
                f"not done within {within_s:g} s (--within): it continues; see `tandem status`"
            )
        time.sleep(_POLL_S)
        try:
            state, last_reply_s = _request_scale(server, "GET", None), time.monotonic()
        except ConfigError:
            if time.monotonic() - last_reply_s > _MAX_SILENCE_S:
                raise
            continue
        if state.number != started.number:
            raise LaunchError(
                "the launcher was restarted, or another scale request has begun: see "
                "`tandem status`, and scale again"
            )


def _request_scale(server: Server, method: str, requested: ScaleTarget | None) -> ScaleState:
    body = None if requested is None else msgspec.json.encode(requested)
    answer = send_request(
        server, method, "/scale", most_bytes=_MAX_BYTES, timeout_s=_REQUEST_TIMEOUT_S, content=body
    )
    if answer.status != 200:
        hint = "give http.operator_key as --api-key: " if answer.status == 401 else ""
        detail = error_message(answer.body)
        raise ConfigError(f"--url {server.url}: {answer.status}: {hint}{detail}")
    return decode_answer(server, "/scale", answer, ScaleState)
