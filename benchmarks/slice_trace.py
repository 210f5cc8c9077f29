"""What the parts of a slice were, and of what else a rank's loop does between two: how long each
took, and what can have made it long.

A part is a step of a task, named by the yields that it lies between, or a function of the loop.
Of each: processor time of the thread and the clock, page faults, how often the operating system
took the processor away, the garbage collector's time, and products that oneDNN compiled (its log
of what it creates is read: `spy_on_compiling` before torch is imported).
"""

from __future__ import annotations

import functools
import gc
import os
import resource
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Part(NamedTuple):
    """taken: how often the processor was given to others. compiled: oneDNN's word of each."""

    what: str
    processor_ms: float
    clock_ms: float
    faults: int
    taken: int
    garbage_ms: float
    compiled: list[str]


class _Reading(NamedTuple):
    processor_s: float
    clock_s: float
    faults: int
    taken: int
    garbage_s: float
    log_bytes: int


class Tracer:
    """Of one thread. parts: since they were last taken."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._garbage_s = self._garbage_since_s = 0.0
        gc.callbacks.append(self._collects)

    def take_log(self) -> None:
        """What oneDNN prints goes to the tracer from now on."""
        os.dup2(self._log.fileno(), 1)

    def taken(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    def steps(self, name: str, steps: Generator[None, None, T]) -> Generator[None, None, T]:
        """The same generator, each step of which is a part."""
        here = "start"
        while True:
            before = self._read()
            try:
                next(steps)
            except StopIteration as done:
                self._add(f"{name}: {here} to end", before)
                value: T = done.value
                return value
            there = _place(steps)
            self._add(f"{name}: {here} to {there}", before)
            here = there
            try:
                yield
            except GeneratorExit:
                steps.close()
                raise

    def around(self, owner: type, name: str) -> None:
        """That method is a part from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            before = self._read()
            try:
                return method(*args, **kwargs)
            finally:
                self._add(method.__qualname__, before)

        setattr(owner, name, traced)

    def _read(self) -> _Reading:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return _Reading(
            time.thread_time(),
            time.monotonic(),
            usage.ru_minflt,
            usage.ru_nivcsw,
            self._garbage_s,
            os.fstat(self._log.fileno()).st_size,
        )

    def _add(self, what: str, before: _Reading) -> None:
        now = self._read()
        part = Part(
            what,
            round(1e3 * (now.processor_s - before.processor_s), 2),
            round(1e3 * (now.clock_s - before.clock_s), 2),
            now.faults - before.faults,
            now.taken - before.taken,
            round(1e3 * (now.garbage_s - before.garbage_s), 2),
            self._compiled(before.log_bytes, now.log_bytes),
        )
        self.parts.append(part)

    def _compiled(self, first: int, last: int) -> list[str]:
        text = os.pread(self._log.fileno(), last - first, first).decode(errors="replace")
        found = []
        for line in text.splitlines():
            if ",create:cache_miss," in line:
                fields = line.split(",")
                found.append(f"{fields[5]} {fields[-2]} {float(fields[-1]):.2f} ms")
        return found

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._garbage_since_s = time.monotonic()
        else:
            self._garbage_s += time.monotonic() - self._garbage_since_s


def spy_on_compiling() -> None:
    """oneDNN says what it creates, once it is loaded."""
    os.environ["ONEDNN_VERBOSE"] = "profile_create"


def _place(steps: Generator[None, None, Any]) -> str:
    """The function and line of the yield at which it stands."""
    inner: Any = steps
    while getattr(inner, "gi_yieldfrom", None) is not None:
        inner = inner.gi_yieldfrom
    frame = getattr(inner, "gi_frame", None)
    return "a yield" if frame is None else f"{frame.f_code.co_qualname}:{frame.f_lineno}"
