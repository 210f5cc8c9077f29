"""SIGTERM in a rank's process: it is told on a thread of its own, whatever the main thread is in.

Python runs a handler in the main thread, when that comes to run Python at all: in a Ray actor it is
in Ray's own loop. The number of a signal is written to a descriptor at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from contracts.logs import event

log = logging.getLogger("tandem.worker")


def at_sigterm(leave: Callable[[], None]) -> None:
    """Calls `leave` at the first SIGTERM, and ends the process after it, or at the second. Without
    effect but in the main thread: a rank in another one is no process."""
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    watching = threading.Thread(
        target=_watch, args=(reading, writing, leave), name="sigterm", daemon=True
    )
    watching.start()


def _watch(reading: socket.socket, writing: socket.socket, leave: Callable[[], None]) -> None:
    """writing: kept open."""
    _wait(reading)
    threading.Thread(target=_leave, args=(leave,), name="leaving", daemon=True).start()
    _wait(reading)
    writing.close()
    os._exit(128 + signal.SIGTERM)


def _wait(reading: socket.socket) -> None:
    """Until there is a SIGTERM among what is read."""
    while signal.SIGTERM not in reading.recv(64):
        pass


def _leave(leave: Callable[[], None]) -> None:
    try:
        leave()
    except BaseException as error:  # noqa: BLE001 - logged; the process ends in any case
        event(log, "not_left_in_order", logging.ERROR, error)
    os._exit(0)
