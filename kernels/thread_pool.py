"""Threads of the CPU's kernels, which wait and take work in compiled code.

A call costs about a microsecond if the threads are awake. They look for work for some time after a
call (`set_spin`) before they sleep, because waking one takes a system call, and on an idle core of
a virtual machine a tenth of a millisecond.

One caller at a time uses the threads; another one computes alone. Results do not depend on it.
"""

from __future__ import annotations

import enum
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from kernels.compiled import I8, I32, I64, compiled, intrinsic, pointer

FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_HAS_FUTEX: Final = sys.platform == "linux" and FUTEX != 0
_WAIT, _WAKE = 128, 129  # of this process only
_PARTS_PER_THREAD = 4
_MOST_PARTS = 1 << 12

# Bytes from the pool's address; each in a cache line of its own.
_TICKET, _DONE, _WORD, _SLEEPING, _BUSY, _CALL, _THREADS, _JOBS = (64 * n for n in range(8))
_FUNCTION, _ARGS, _COUNT = _CALL, _CALL + 8, _CALL + 16
_STATE_WORDS: Final = 128


@intrinsic
def _add(_: Any, address: Any, value: Any) -> Any:
    """Add to an int64 as one step, and return what it was."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_read(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_write(_: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pause(_: Any) -> Any:
    """Let the core's other thread run for some ten cycles."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _call(_: Any, function: Any, args: Any, first: Any, last: Any) -> Any:
    """Call compiled code of `Part`, as numba calls functions: status f(result, error, ...)."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        unused = I8.as_pointer().as_pointer()
        kind = ir.FunctionType(I32, [unused, unused, I64, I64, I64])
        function = builder.inttoptr(given[0], kind.as_pointer())
        slots = [cgutils.alloca_once(builder, I8.as_pointer()) for _ in range(2)]
        builder.call(function, [*slots, *given[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 5))
yield_core = types.ExternalFunction("sched_yield", types.int32())


@compiled
def _take_parts(pool: int) -> Any:
    """Run parts until none is left, and return the number of the call that they belonged to."""
    while True:
        ticket = _add(pool + _TICKET, 1)
        part, parts = ticket & 0xFFFF, (ticket >> 16) & 0xFFFF
        if part >= parts:
            return ticket >> 32
        count = atomic_read(pool + _COUNT)
        first, last = count * part // parts, count * (part + 1) // parts
        _call(atomic_read(pool + _FUNCTION), atomic_read(pool + _ARGS), first, last)
        _add(pool + _DONE, 1)


@compiled
def _serve(pool: int, spins: int) -> None:
    """Take parts of every call, in a thread of its own, as long as the pool has threads."""
    seen, turns = 0, 0
    while atomic_read(pool + _THREADS):
        if atomic_read(pool + _TICKET) >> 32 != seen:
            seen, turns = _take_parts(pool), 0
        elif turns < spins:
            turns += 1
            _pause()
        else:
            _add(pool + _SLEEPING, 1)
            syscall(FUTEX, pool + _WORD, _WAIT, seen, 0)
            _add(pool + _SLEEPING, -1)
            turns = 0


@compiled
def run_parts(pool: int, job: int, args: Any, count: int, least: int) -> None:
    """Call part number `job` of PARTS for all of range(count) in the threads of the pool.

    args: int64, for the part. least: smallest part that is worth a thread.
    """
    if count <= 0:
        return
    function, threads = atomic_read(pool + _JOBS + 8 * job), atomic_read(pool + _THREADS)
    parts = min(threads * _PARTS_PER_THREAD, count // max(1, least), _MOST_PARTS)
    if threads == 1 or parts <= 1 or _add(pool + _BUSY, 1):
        if threads > 1 and parts > 1:
            _add(pool + _BUSY, -1)
        _call(function, args.ctypes.data, 0, count)
        return
    call = ((atomic_read(pool + _TICKET) >> 32) + 1) & 0x7FFFFFFF
    atomic_write(pool + _FUNCTION, function)
    atomic_write(pool + _ARGS, args.ctypes.data)
    atomic_write(pool + _COUNT, count)
    atomic_write(pool + _DONE, 0)
    atomic_write(pool + _WORD, call)
    atomic_write(pool + _TICKET, call << 32 | parts << 16)
    if atomic_read(pool + _SLEEPING):
        syscall(FUTEX, pool + _WORD, _WAKE, threads, 0)
    _take_parts(pool)
    turns = 0
    while atomic_read(pool + _DONE) < parts:
        turns += 1
        if turns < 1000:
            _pause()
        else:
            yield_core()
    _add(pool + _BUSY, -1)


Part = Callable[[int, int, int], None]
"""Compiled function of (address of int64 arguments, first, last)."""


class PartNumber(enum.IntEnum):
    """Numbers of all parts. Compiled code on disk holds them, whatever a process imports first."""

    MULTIPLY = 0
    MULTIPLY_HEADS = 1
    RUN_EXPERTS = 2
    ADD_WEIGHTED = 3
    ATTEND = 4
    ADVANCE = 5
    SELECT_TOKENS = 6
    READ_LOGITS = 7


PARTS: dict[PartNumber, Any] = {}
_spin_s = 0.0


def register_part(number: PartNumber, part: Part) -> int:
    """Set the compiled part of a number, and return the number for `run_parts`."""
    PARTS[number] = part
    return int(number)


def compile_parts() -> None:
    """Compile the parts and the loop of a thread."""
    nothing = np.zeros(_STATE_WORDS, np.int64)
    for part in PARTS.values():
        part(nothing.ctypes.data, 0, 0)
    _serve(nothing.ctypes.data, 0)


def set_spin(seconds: float) -> None:
    """Set how long threads of pools that are made from now on look for work before they sleep."""
    global _spin_s
    _spin_s = seconds


def shared_pool() -> int:
    """Return the address of a pool of torch's number of threads, the caller's included."""
    return _pool(os.getpid(), torch.get_num_threads()).address


class _Pool:
    def __init__(self, threads: int) -> None:
        compile_parts()
        self._state: NDArray[np.int64] = np.zeros(_STATE_WORDS, np.int64)
        self.address = -(-self._state.ctypes.data // 64) * 64
        words = self._state[(self.address - self._state.ctypes.data) // 8 :]
        words[_THREADS // 8] = threads if _HAS_FUTEX else 1
        for job, part in PARTS.items():
            words[_JOBS // 8 + job] = _address(part)
        spins = int(_spin_s / _pause_s())
        for n in range(1, threads if _HAS_FUTEX else 1):
            thread = threading.Thread(target=self._serve, args=(spins,), daemon=True)
            thread.name = f"kernel-{n}"
            thread.start()

    def _serve(self, spins: int) -> None:
        """Run a thread, which keeps the state: it outlives the pool."""
        _serve(self.address, spins)


@functools.cache
def _pool(process: int, threads: int) -> _Pool:
    """Return the pool of a process: a forked one has none of its parent's threads.

    Threads that call at once may make several, of which one is used from then on.
    """
    return _Pool(threads)


def _address(part: Any) -> int:
    (compiled_part,) = part.overloads.values()
    name = compiled_part.fndesc.llvm_func_name
    return compiled_part.library.get_pointer_to_function(name)  # type: ignore[no-any-return]


@functools.cache
def _pause_s() -> float:
    _pauses(1)
    start_s = time.perf_counter()
    _pauses(10_000)
    return (time.perf_counter() - start_s) / 10_000


@compiled
def _pauses(count: int) -> None:
    for _ in range(count):
        _pause()
