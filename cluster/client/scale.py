"""`tandem scale`: more ranks or fewer, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from cluster.client.answers import Server, ask, message_of
from contracts.errors import ConfigError, LaunchError
from contracts.scaling import ScaleState, ScaleWanted, in_words

_ASK_S: Final = 30.0
_MAX_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.5
_SILENT_S: Final = 60.0  # so long nobody may answer while a launcher is replaced


def begin_scale(server: Server, wanted: ScaleWanted) -> ScaleState:
    """Raises ConfigError where it cannot be, or nobody answers."""
    return _ask(server, "POST", wanted)


def follow_scale(
    server: Server,
    begun: ScaleState,
    say: Callable[[str], None],
    within_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> ScaleState:
    """Says each step, until it has ended. Raises LaunchError if it has failed, or not ended by
    then: it goes on in the server."""
    end_s, heard_s = time.monotonic() + within_s, time.monotonic()
    said, state = 0, begun
    while True:
        for step in state.steps[said:]:
            say(step)
        said = len(state.steps)
        if state.state == "failed":
            raise LaunchError(f"{state.reason}; there are {in_words(state.ranks)}")
        if state.state != "running":
            return state
        if time.monotonic() > end_s:
            raise LaunchError(
                f"not done within {within_s:g} s (--within): it goes on; look at `tandem status`"
            )
        sleep(_LOOK_S)
        try:
            state, heard_s = _ask(server, "GET", None), time.monotonic()
        except ConfigError:
            if time.monotonic() - heard_s > _SILENT_S:
                raise
            continue
        if state.number != begun.number:
            raise LaunchError(
                "the launcher of the ranks was started anew, or another scale has begun: look at "
                "`tandem status`, and scale again"
            )


def _ask(server: Server, method: str, wanted: ScaleWanted | None) -> ScaleState:
    body = None if wanted is None else msgspec.json.encode(wanted)
    status, answer = ask(
        server, method, "/scale", most_bytes=_MAX_BYTES, timeout_s=_ASK_S, content=body
    )
    if status == 401:
        told = message_of(answer)
        raise ConfigError(f"--url {server.url}: 401: give http.operator_key as --api-key: {told}")
    if status != 200:
        raise ConfigError(f"--url {server.url}: {status}: {message_of(answer)}")
    try:
        return msgspec.json.decode(answer, type=ScaleState)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(
            f"--url {server.url}: /scale did not answer as Tandem does: is it another server, or "
            "another version?"
        ) from None
