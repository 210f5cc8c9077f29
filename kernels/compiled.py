"""Functions compiled by numba for the CPU, and the small operations that they share.

Compiled functions take addresses and sizes, so that a call costs about a microsecond, release the
interpreter lock, and are kept on disk for the next process (`compile_on_disk`). Floating point is
not reordered: a loop gives the same bits whether LLVM vectorises it or not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import carray, extending, types
from numba.core import cgutils
from numba.core.caching import NullCache, UserProvidedCacheLocator

from contracts.logs import event

log = logging.getLogger(f"tandem.{__name__}")

Function = TypeVar("Function", bound=Callable[..., Any])
intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
"""Decorator of a function that returns a signature, and a function that emits LLVM code."""

LANES: Final = 16  # float32 numbers of a vector; the processor may split it
F32 = ir.FloatType()
I8, I32, I64 = (ir.IntType(bits) for bits in (8, 32, 64))
VECTOR, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


# LLVM's third level unswitches nested loops, and then runs an odd number of steps too far.
numba.config.OPT = type(numba.config.OPT)(2)

_functions: list[Any] = []
_LOCK_S = 300.0  # for another process to compile, which takes 20 to 60 s of a core
_KEPT_S = 30 * 86400.0  # after the last start that used it


def compiled(function: Function) -> Function:
    """Compile at the first call with its argument types."""
    _functions.append(numba.njit(nogil=True, error_model="numpy")(function))
    return _functions[-1]  # type: ignore[no-any-return]


class Locator(UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    """Place of a function's code: the same for all copies of the sources."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return Path(py_file).parent.name


def compile_on_disk(call_all: Callable[[], None]) -> None:
    """Call functions, whose code is read from disk, or compiled and kept there for next time.

    One process at a time: numba mixes up the files of functions that two processes save.
    """
    with _locked_folder() as folder:
        if folder is not None:
            numba.config.CACHE_DIR = str(folder)
            numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
            for function in _functions:
                function.enable_caching()
        try:
            call_all()
        except Exception as error:  # noqa: BLE001  (a full disk, a damaged file: do without)
            event(log, "compiled_code_not_kept", logging.WARNING, reason=repr(error))
            _leave_disk()
            call_all()
        _leave_disk()


def _leave_disk() -> None:
    for function in _functions:
        function._cache = NullCache()


def code_folder() -> Path | None:
    """Create and return the folder of compiled code; None if no folder can be written.

    Its name depends on the processor and on all sources: numba itself does not notice changes of
    the functions that a function calls. Installations of the same sources share the user's folder.
    """
    here = Path(__file__).parent
    outside = {Path(function.py_func.__code__.co_filename) for function in _functions}
    key = [path.read_bytes() for path in sorted({*here.glob("*.py"), *outside})]
    key.append(repr((_PROCESSOR, sys.version, numba.__version__, llvmlite.__version__)).encode())
    name = f"compiled-{hashlib.blake2b(b''.join(key), digest_size=8).hexdigest()}"
    for parent in (Path("~/.cache/tandem"), here / "__pycache__"):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
            folder = parent.expanduser() / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and _is_ours(folder) and _is_ours(folder.parent):
                return folder
    return None


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path | None]:
    """Lock and yield the folder of compiled code, or None without one that can be locked."""
    folder = code_folder()
    if folder is None:
        yield None
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        is_locked = _locked(opened)
        if is_locked:
            _remove_unused(folder)
        yield folder if is_locked else None
    finally:
        os.close(opened)


def _remove_unused(folder: Path) -> None:
    """Mark a folder as used, and remove others of earlier versions that no process uses."""
    with contextlib.suppress(OSError):
        os.utime(folder)
        for other in folder.parent.glob("compiled-*"):
            if other != folder and time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return whether no other user can put code into a folder."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _locked(opened: int) -> bool:
    """Lock a folder; return False if that is impossible, or another process holds it too long."""
    give_up_s = time.monotonic() + _LOCK_S
    while time.monotonic() < give_up_s:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return False
        else:
            return True
    return False


_PROCESSOR = (
    numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name(),
    numba.config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten(),
)


def processor_name() -> str:
    """Return the processor that code is compiled for, by LLVM's name."""
    return str(_PROCESSOR[0])


def processor_has(feature: str) -> bool:
    """Return whether code is compiled for an instruction set, by LLVM's name."""
    named = numba.config.CPU_FEATURES
    if named is not None:
        return f"+{feature}" in named.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


def bits_of(value: float) -> int:
    """Return a float64's bits, for a table of int64 arguments (`float_of_bits`)."""
    return int(np.float64(value).view(np.int64))


def pointer(builder: ir.IRBuilder, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(element))


def emit_loop(
    builder: ir.IRBuilder,
    count: Any,
    before: list[Any],
    step: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Emit a loop of `count` steps, at least one, from vectors before it; return those after it.

    step: emits a step by its number and the vectors before it, and returns those after it.
    """
    entry, loop = builder.block, builder.append_basic_block("steps")
    after = builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(I64)
    number.add_incoming(I64(0), entry)
    vectors = [builder.phi(VECTOR) for _ in before]
    ends = step(number, list(vectors))
    following = builder.add(number, I64(1))
    number.add_incoming(following, builder.block)
    for vector, first, end in zip(vectors, before, ends, strict=True):
        vector.add_incoming(first, entry)
        vector.add_incoming(end, builder.block)
    branch = builder.cbranch(builder.icmp_signed("!=", following, count), loop, after)
    branch.set_metadata("llvm.loop", _as_written(builder.module))
    builder.position_at_end(after)
    return ends


def _as_written(module: ir.Module) -> Any:
    """Return metadata of a loop that LLVM must not unroll: it runs odd counts of steps too far."""
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.values.MDValue(module, [disable], name=str(len(module.metadata)))
    loop.operands = (loop, disable)  # itself first, as LLVM requires
    return loop


def vector_function(builder: ir.IRBuilder, name: str, operand: ir.Type) -> Any:
    """Declare an LLVM function of a vector and two operands that returns a vector."""
    kind = ir.FunctionType(VECTOR, [VECTOR, operand, operand])
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _pointer_to(element: types.Type) -> Any:
    @intrinsic
    def pointer(_: Any, address: types.Type) -> Any:
        kind = types.CPointer(element)

        def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(address), generate

    return pointer


float32_at = _pointer_to(types.float32)
uint16_at = _pointer_to(types.uint16)
int32_at = _pointer_to(types.int32)
int64_at = _pointer_to(types.int64)


def _bitcast(source: types.Type, target: types.Type) -> Any:
    @intrinsic
    def cast(_: Any, value: types.Type) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return cast


_bits_of = _bitcast(types.float32, types.uint32)
_float_of = _bitcast(types.uint32, types.float32)
_power_of = _bitcast(types.int32, types.float32)
float_bits = _bitcast(types.float64, types.int64)
float_of_bits = _bitcast(types.int64, types.float64)

_LOG2E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
_LEAST, _MOST = np.float32(-87.3), np.float32(88.3)
_E0, _E1, _E2 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_E3, _E4, _E5 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_ONE = np.float32(1.0)


@compiled
def address_of(array: Any) -> Any:
    """Return the address of an array as int64; keep the array in use as long as its address."""
    return np.int64(array.ctypes.data)


_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_MONOTONIC = np.int32(time.CLOCK_MONOTONIC)


@compiled
def now_ns() -> Any:
    """Return the nanoseconds of Python's monotonic clock."""
    now = np.empty(2, np.int64)
    _clock_gettime(_MONOTONIC, address_of(now))
    return now[0] * 1_000_000_000 + now[1]


@compiled
def exp(x: Any) -> Any:
    """Return e to the power of a float32, within 2 units in the last place (Cephes)."""
    x = min(max(x, _LEAST), _MOST)
    n = (x * _LOG2E + _ROUNDER) - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = _power_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return (series * r * r + r + _ONE) * power


def all_lanes(builder: ir.IRBuilder, value: Any) -> Any:
    """Emit a vector of equal numbers."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, INTEGERS([0] * LANES))


def folded(builder: ir.IRBuilder, vector: Any, both: Callable[[Any, Any], Any]) -> Any:
    """Emit the fold of all lanes of a vector, by halves."""
    width = LANES // 2
    while width:
        upper = [(n + width) % LANES for n in range(LANES)]
        vector = both(vector, builder.shuffle_vector(vector, vector, INTEGERS(upper)))
        width //= 2
    return builder.extract_element(vector, I32(0))


def emit_exp(builder: ir.IRBuilder, x: Any) -> Any:
    """Emit `exp` of a vector of numbers up to 88, with fused products."""

    def fused(a: Any, b: Any, c: Any) -> Any:
        function = vector_function(builder, f"llvm.fma.v{LANES}f32", VECTOR)
        return builder.call(function, [a, b, c])

    def all_of(value: Any) -> Any:
        return VECTOR([float(value)] * LANES)

    x = builder.select(builder.fcmp_ordered("<", x, all_of(_LEAST)), all_of(_LEAST), x)
    n = builder.fsub(fused(x, all_of(_LOG2E), all_of(_ROUNDER)), all_of(_ROUNDER))
    r = fused(n, all_of(-_LN2_LOW), fused(n, all_of(-_LN2_HIGH), x))
    series = all_of(_E0)
    for term in (_E1, _E2, _E3, _E4, _E5):
        series = fused(series, r, all_of(term))
    exponent = builder.add(builder.fptosi(n, INTEGERS), INTEGERS([127] * LANES))
    power = builder.bitcast(builder.shl(exponent, INTEGERS([23] * LANES)), VECTOR)
    grown = builder.fadd(fused(builder.fmul(series, r), r, r), all_of(_ONE))
    return builder.fmul(grown, power)


@compiled
def to_bfloat16(x: Any) -> Any:
    """Return the bits of a float32 rounded to the nearest bfloat16, ties to even."""
    bits = _bits_of(x)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@compiled
def from_bfloat16(bits: Any) -> Any:
    """Return the float32 of a bfloat16's bits."""
    return _float_of(np.uint32(bits) << np.uint32(16))


@compiled
def rounded_number(wide: bool, x: Any) -> Any:
    """Return a float32 as it is stored: rounded to bfloat16 unless `wide`."""
    return x if wide else from_bfloat16(to_bfloat16(x))


@compiled
def read_numbers(wide: bool, address: int, count: int, into: Any) -> None:
    """Copy float32 (`wide`) or bfloat16 numbers to a float32 array."""
    if wide:
        floats = carray(float32_at(address), (count,))
        for i in range(count):
            into[i] = floats[i]
    else:
        bits = carray(uint16_at(address), (count,))
        for i in range(count):
            into[i] = from_bfloat16(bits[i])


@compiled
def write_numbers(wide: bool, address: int, count: int, values: Any) -> None:
    """Store float32 numbers, rounded to bfloat16 unless `wide`."""
    if wide:
        floats = carray(float32_at(address), (count,))
        for i in range(count):
            floats[i] = values[i]
    else:
        bits = carray(uint16_at(address), (count,))
        for i in range(count):
            bits[i] = to_bfloat16(values[i])


@compiled
def copy_bits(address: int, count: int, to: int) -> None:
    """Copy units of two bytes."""
    source, target = carray(uint16_at(address), (count,)), carray(uint16_at(to), (count,))
    for i in range(count):
        target[i] = source[i]
