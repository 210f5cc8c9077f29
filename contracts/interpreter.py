"""Python's cyclic garbage collector, in processes that live long."""

from __future__ import annotations

import faulthandler
import gc
import io
import sys
import threading
import time
import traceback


def freeze_heap() -> None:
    """Once a process is ready: what it has made by then stays, so no collection need look at it
    again. Modules and weights are hundreds of thousands of objects; walking them took a quarter
    of a router's time per row."""
    gc.collect()
    gc.freeze()


MAX_FRAMES = 40  # of a thread, the innermost


def thread_stacks() -> str:
    """Of all threads but the caller's: files, lines and code, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES)
            stack.reverse()
            stacks.append(f"thread {names.get(ident, ident)}:\n" + "".join(stack.format()))
    return "".join(stacks).rstrip()


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
