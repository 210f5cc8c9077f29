"""Garbage collection and stack dumps of long-lived processes."""

import faulthandler
import gc
import io
import sys
import threading
import time
import traceback


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection; call once the process is ready.

    Modules and weights are hundreds of thousands of objects; traversing them took a quarter of a
    router's time per row.
    """
    gc.collect()
    gc.freeze()


MAX_FRAMES = 40  # innermost frames of a thread


def thread_stacks() -> str:
    """Return the stacks of all threads but the caller's: files, lines and code, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES)
            stack.reverse()
            stacks.append(f"thread {names.get(ident, ident)}:\n" + "".join(stack.format()))
    return "".join(stacks).rstrip()


def watch_interpreter(after_s: float) -> None:
    """Dump all stacks to standard error if no Python thread has run for `after_s`.

    A library that holds the interpreter lock prevents regular logging.
    """
    try:
        sys.stderr.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return

    def arm() -> None:
        while True:
            faulthandler.dump_traceback_later(after_s)
            time.sleep(after_s / 4)

    threading.Thread(target=arm, name="interpreter-watch", daemon=True).start()
