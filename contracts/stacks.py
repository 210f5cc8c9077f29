"""What the threads of this process are at: for the log of one that stands still."""

from __future__ import annotations

import faulthandler
import io
import sys
import threading
import time
import traceback

MAX_FRAMES = 40  # of a thread, the innermost


def thread_stacks() -> str:
    """Of all threads but the caller's: files, lines and code, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    told = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES)
            stack.reverse()
            told.append(f"thread {names.get(ident, ident)}:\n" + "".join(stack.format()))
    return "".join(told).rstrip()


def watch_interpreter(after_s: float) -> None:
    """From now on faulthandler writes all stacks to standard error when no thread of Python has run
    for so long: a library holds the interpreter, and no log of ours can be written."""
    try:
        sys.stderr.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return

    def arm() -> None:
        while True:
            faulthandler.dump_traceback_later(after_s)
            time.sleep(after_s / 4)

    threading.Thread(target=arm, name="interpreter-watch", daemon=True).start()
