"""Whom an attention rank dials, once it is told where the expert ranks are."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Final

from actors.channels.base import Endpoint
from contracts.clock import monotonic_s
from contracts.errors import ChannelError

NEW_S: Final = 1.0  # so long a link may be none yet to whoever asks for the peers


class Joining:
    """Joins the expert ranks at those addresses, by name: all that it has no link to, or that are
    elsewhere now. Each is dialled by a thread of its own: one that is silent holds up no other. To
    be called from one thread at a time, beside the loop."""

    def __init__(self, endpoint: Endpoint, patience_s: float) -> None:
        """patience_s: for those that are slow; they are joined later, or told of the next time."""
        self._endpoint, self._patience_s = endpoint, patience_s
        self._joined: dict[str, tuple[str, float]] = {}  # where, and when
        self._dialling: dict[str, tuple[str, Future[None]]] = {}  # where

    def __call__(self, addresses: dict[str, str]) -> None:
        """Raises what keeps it from joining one, once it has tried all: ChannelError."""
        dials = {
            peer: self._dialled(peer, address)
            for peer, address in addresses.items()
            if not self._is_joined(peer, address)
        }
        done, _ = wait(dials.values(), self._patience_s)
        for peer, dial in dials.items():
            if dial not in done:
                silent = f"it has not answered for {self._patience_s:g} s"
                raise ChannelError(f"cannot join {peer}: {silent}")
            dial.result()

    def _is_joined(self, peer: str, address: str) -> bool:
        at, since_s = self._joined.get(peer, ("", 0.0))
        is_new = monotonic_s() - since_s < NEW_S
        return at == address and (is_new or peer in self._endpoint.peers())

    def _dialled(self, peer: str, address: str) -> Future[None]:
        """What comes of it, whether it was dialled before or is now."""
        at, known = self._dialling.get(peer, ("", Future()))
        if at == address and not known.done():
            return known
        dial: Future[None] = Future()
        self._dialling[peer] = address, dial
        arguments = (peer, address, dial)
        threading.Thread(
            target=self._dial, args=arguments, name=f"dials-{peer}", daemon=True
        ).start()
        return dial

    def _dial(self, peer: str, address: str, dial: Future[None]) -> None:
        try:
            self._endpoint.join(peer, address)
        except ChannelError as error:  # says what happened, but not always to whom
            message = f"cannot join {peer}: {error.message}"
            dial.set_exception(type(error)(message, *error.args[1:]))
        else:
            self._joined[peer] = address, monotonic_s()
            dial.set_result(None)
        finally:
            if not dial.done():  # an error that nobody has foreseen
                dial.set_exception(ChannelError(f"cannot join {peer}: see this rank's log"))
