"""Weights in panels as checkpoints store them: MXFP4, fp8, int8, and bfloat16 for float32 rows.

    panel of 16 outputs    values                        then scales
    MXFP4                  [K / 8, 16] words             [K / 32, 16] exponents
    fp8                    [ceil(K / 2), 16, 2] bytes    [ceil(K / 128), 16] float32, times 2**120
    int8                   [2 * ceil(K / 2), 16] bytes   [ceil(K / 128), 16] float32
    bfloat16               [ceil(K / 2), 16, 2]          none

A word of MXFP4 has the codes of eight inputs: number j of its lower half is input 2j, of its upper
half input 2j + 1, so that one shift moves the codes of two neighbours to where they are looked up.

A product of few rows unpacks weights in registers, one of many rows a panel at a time into the
cache: to the numbers of kernels/quantization.py, rounded to the dtype of the rows. Bits are those
of a product with unpacked weights.

Shapes: N outputs, K inputs. A pair is two neighbours in K; a unit, the pairs that are unpacked
together; a group, the pairs with one scale.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor
from torch.nn import functional

from kernels.compiled import (
    I8,
    I32,
    I64,
    INTEGERS,
    LANES,
    VECTOR,
    compiled,
    emit_loop,
    intrinsic,
    pointer,
    processor_has,
)
from kernels.quantization import FP8_BLOCK, MXFP4_GROUP

HAS_PAIRS: Final = processor_has("avx512bf16") and processor_has("avx512f")


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has none
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Storage(enum.IntEnum):
    """Storage of a weight. PLAIN: panels of the arithmetic's numbers."""

    PLAIN = 0
    MXFP4 = 1
    FP8 = 2
    BFLOAT16 = 3
    INT8 = 4


class StoredWeight(NamedTuple):
    """A weight [N, K]. panels: its bytes, 1-D."""

    panels: Tensor
    shape: tuple[int, int]
    storage: Storage


class RawWeight(NamedTuple):
    """A weight [N, K] in rows.

    codes: MXFP4: uint8 [N, K / 32, 16], others [N, K]. scales: MXFP4: exponents uint8 [N, K / 32]
    (`dequantize_mxfp4`); fp8 and int8: float32, of each row's blocks of FP8_BLOCK inputs.
    """

    storage: Storage
    codes: Tensor
    scales: Tensor | None = None

    def packed(self) -> StoredWeight:
        """Return its panels. Raises ValueError, as `checked`."""
        storage, codes, scales = self.checked()
        N, K = codes.flatten(1).shape
        if storage is Storage.MXFP4:
            K, values = 2 * K, _words_of_fp4(codes)
        else:
            values = codes.view(torch.uint8) if storage is Storage.FP8 else codes
            values = functional.pad(values, (0, K % 2)).contiguous()
        if storage is Storage.BFLOAT16:
            values = values.view(torch.int32)  # a pair
        elif storage is Storage.FP8 and scales is not None:
            values, scales = values.view(torch.int16), scales * _FP8_POWER
        panels = _panels(values, *([] if scales is None else [scales]))
        return StoredWeight(panels, (N, K), storage)

    def checked(self) -> RawWeight:
        """Return it. Raises ValueError for numbers that products do not unpack.

        Those are numbers that are not finite, and scales that are too large or small to unpack.
        """
        codes, scales = self.codes, self.scales
        if scales is None or not scales.numel():
            return self
        if self.storage is Storage.MXFP4:
            if not 3 <= int(scales.min()) <= int(scales.max()) <= 252:
                raise ValueError("an exponent of MXFP4 is outside 3 to 252")
            return self
        sizes, most = scales.abs(), 6 if self.storage is Storage.FP8 else 100
        if not ((sizes == 0) | ((sizes >= 2.0**-100) & (sizes <= 2.0**most))).all():
            raise ValueError(f"a scale of {self.storage.name} is outside 2**-100 to 2**{most}")
        if self.storage is Storage.FP8 and (codes.view(torch.uint8) & 127 == 127).any():
            raise ValueError("a weight of fp8 is not a number")
        return self


def _words_of_fp4(blocks: Tensor) -> Tensor:
    """Return codes [N, K / 32, 16] as words [N, K / 8]."""
    codes = blocks.flatten(1).view(torch.int32)  # of eight neighbours, from the lowest bits
    numbers = codes.unsqueeze(2) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    places = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
    return (numbers << places).sum(2, dtype=torch.int32)


def _panels(*rows: Tensor) -> Tensor:
    """Return, for each 16 rows, their transposed elements, of one tensor after the other."""
    parts = []
    for each in rows:
        padded = functional.pad(each, (0, 0, 0, -each.shape[0] % LANES)).contiguous()
        panels = padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()
        parts.append(panels.view(torch.uint8).flatten(1))
    return torch.cat(parts, 1).flatten()


# --- unpacking

_WORD: Final = 4 * LANES  # bytes
_FP8_POWER: Final = 2.0**120  # of the bits of e4m3 as bits of a float32
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES, _ALL_BYTES = ir.VectorType(I8, 32), ir.VectorType(I8, 4 * LANES)
_HALVES = [ir.VectorType(I32, 32)(list(range(first, first + 32))) for first in (0, 32)]
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


class _Layout(NamedTuple):
    """Bytes and pairs of a unit of a panel; pairs of a group, and bytes of its scales."""

    unit_bytes: int
    unit_pairs: int
    group_pairs: int
    scale_bytes: int


_NO_GROUPS: Final = 1 << 40
LAYOUTS: Final = {
    Storage.MXFP4: _Layout(_WORD, 4, MXFP4_GROUP // 2, LANES),
    Storage.FP8: _Layout(2 * LANES, 1, FP8_BLOCK // 2, _WORD),
    Storage.BFLOAT16: _Layout(_WORD, 1, _NO_GROUPS, 0),
    Storage.INT8: _Layout(2 * LANES, 1, FP8_BLOCK // 2, _WORD),
}


def _integers(value: int) -> ir.Constant:
    return INTEGERS([value] * LANES)


def _function(builder: ir.IRBuilder, name: str, result: ir.Type, *operands: ir.Type) -> Any:
    kind = ir.FunctionType(result, operands)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _from_fp4(builder: ir.IRBuilder, words: Any, place: int) -> Any:
    """Emit float32 numbers of the four bits from `place`: sign, exponent of two, mantissa."""
    codes = builder.lshr(words, _integers(place)) if place else words
    if processor_has("avx512f"):  # a look-up by the lowest four bits
        table = VECTOR([*_FP4, *(-each for each in _FP4)])
        name = "llvm.x86.avx512.permvar.sf.512"
        return builder.call(_function(builder, name, VECTOR, VECTOR, INTEGERS), [table, codes])
    sign = builder.and_(builder.shl(words, _integers(28 - place)), _integers(0x80000000))
    size = builder.and_(codes, _integers(7))
    normal = builder.add(builder.shl(size, _integers(22)), _integers(126 << 23))
    small = builder.mul(size, _integers(0x3F000000))  # 0 and 0.5
    bits = builder.select(builder.icmp_unsigned(">", size, _integers(1)), normal, small)
    return builder.bitcast(builder.or_(bits, sign), VECTOR)


def _unit_of_fp4(builder: ir.IRBuilder, words: Any, scales: Any) -> Iterator[Any]:
    """Emit the numbers of a unit in the order of K, by look-ups of 32 bytes.

    A code's byte is twice its number. As the highest byte of an integer it is 2**25 times as large.
    """
    scales, sizes = builder.fmul(scales, VECTOR([2.0**-25] * LANES)), [int(2 * n) for n in _FP4]
    table = _BYTES([*sizes, *(-size for size in sizes)] * 2)
    look_up = _function(builder, "llvm.x86.avx2.pshuf.b", _BYTES, _BYTES, _BYTES)
    found = []
    for codes in (words, builder.lshr(words, _integers(4))):
        low = builder.bitcast(builder.and_(codes, _integers(0x0F0F0F0F)), _ALL_BYTES)
        halves = [
            builder.call(look_up, [table, builder.shuffle_vector(low, low, _HALVES[half])])
            for half in range(2)
        ]
        joined = builder.shuffle_vector(*halves, ir.VectorType(I32, 64)(list(range(64))))
        found.append(builder.bitcast(joined, INTEGERS))
    for place in range(8):
        number = found[place // 2 % 2]
        shift = 24 - 8 * (place // 4 + 2 * (place % 2))
        if shift:
            number = builder.shl(number, _integers(shift))
        if shift < 24:
            number = builder.and_(number, _integers(0xFF000000))
        yield builder.fmul(builder.sitofp(number, VECTOR), scales)


def _pair_of_fp4(builder: ir.IRBuilder, words: Any, place: int, lowered: Any) -> Any:
    """Emit words of two bfloat16 numbers, of four bits from bits `place` and `place` + 16.

    lowered: the bits by which a number's exponent is below the largest one. Zeros stay zeros.
    """
    largest = [int.from_bytes(np.float32(each * 2.0**125).tobytes()[2:], "little") for each in _FP4]
    table, signs = _SHORTS([*largest] * 4), _integers(0x80008000)
    codes = builder.bitcast(builder.lshr(words, _integers(place)) if place else words, _SHORTS)
    look_up = _function(builder, "llvm.x86.avx512.permvar.hi.512", _SHORTS, _SHORTS, _SHORTS)
    subtract = _function(builder, "llvm.usub.sat.v32i16", _SHORTS, _SHORTS, _SHORTS)
    sizes = builder.call(subtract, [builder.call(look_up, [table, codes]), lowered])
    shifted = builder.shl(words, _integers(12 - place)) if place < 12 else words
    return builder.or_(builder.bitcast(sizes, INTEGERS), builder.and_(shifted, signs))


def _from_fp8(builder: ir.IRBuilder, words: Any, place: int) -> Any:
    """Emit the e4m3 byte 0 or 1 of each word as a float32 that is too small by _FP8_POWER."""
    size = builder.and_(builder.shl(words, _integers(20 - 8 * place)), _integers(0x07F00000))
    sign = builder.and_(builder.shl(words, _integers(24 - 8 * place)), _integers(0x80000000))
    return builder.bitcast(builder.or_(size, sign), VECTOR)


def _from_int8(builder: ir.IRBuilder, address: Any) -> Any:
    """Emit the bytes at an address as float32 numbers."""
    codes = builder.load(pointer(builder, address, ir.VectorType(I8, LANES)), align=1)
    return builder.sitofp(builder.sext(codes, INTEGERS), VECTOR)


def _load(builder: ir.IRBuilder, address: Any, bits: int) -> Any:
    kind = ir.VectorType(ir.IntType(bits), LANES)
    loaded = builder.load(pointer(builder, address, kind), align=1)
    return loaded if bits == 32 else builder.zext(loaded, INTEGERS)


def scales_of(
    builder: ir.IRBuilder, storage: Storage, panel: Any, pairs: Any, group: Any, as_pairs: bool
) -> Any:
    """Emit what the units of a group are unpacked with; panel: the address of `pairs` pairs."""
    layout = LAYOUTS[storage]
    if not layout.scale_bytes:
        return None
    units = builder.lshr(pairs, I64(layout.unit_pairs.bit_length() - 1))
    first = builder.add(panel, builder.mul(units, I64(layout.unit_bytes)))
    address = builder.add(first, builder.mul(group, I64(layout.scale_bytes)))
    if storage is not Storage.MXFP4:
        return builder.load(pointer(builder, address, VECTOR), align=4)
    exponents = _load(builder, address, 8)
    if not as_pairs:
        return builder.bitcast(builder.shl(exponents, _integers(23)), VECTOR)
    lowered = builder.shl(builder.sub(_integers(252), exponents), _integers(7))
    both = builder.or_(lowered, builder.shl(lowered, _integers(16)))
    return builder.bitcast(both, _SHORTS)


def unpacked_unit(builder: ir.IRBuilder, storage: Storage, unit: Any, scales: Any) -> Iterator[Any]:
    """Emit the float32 numbers of a unit, in the order of K, one at a time; unit: its address."""
    if storage is Storage.INT8:
        places = unit, builder.add(unit, I64(LANES))
        yield from (builder.fmul(_from_int8(builder, each), scales) for each in places)
    elif storage is Storage.FP8:
        words = _load(builder, unit, 16)
        yield from (builder.fmul(_from_fp8(builder, words, place), scales) for place in range(2))
    elif storage is Storage.BFLOAT16:
        words = _load(builder, unit, 32)
        yield builder.bitcast(builder.shl(words, _integers(16)), VECTOR)
        yield builder.bitcast(builder.and_(words, _integers(0xFFFF0000)), VECTOR)
    elif processor_has("avx2") and not processor_has("avx512f"):
        yield from _unit_of_fp4(builder, _load(builder, unit, 32), scales)
    else:
        words = _load(builder, unit, 32)
        bits = [4 * pair + half for pair in range(4) for half in (0, 16)]
        yield from (builder.fmul(_from_fp4(builder, words, place), scales) for place in bits)


def unpacked_pairs(builder: ir.IRBuilder, storage: Storage, unit: Any, scales: Any) -> list[Any]:
    """Emit the words of a unit's pairs rounded to bfloat16, for a processor that `HAS_PAIRS`.

    scales: those for pairs.
    """
    if storage is Storage.MXFP4:  # they are exact
        words = _load(builder, unit, 32)
        return [_pair_of_fp4(builder, words, place, scales) for place in range(0, 16, 4)]
    if storage is Storage.BFLOAT16:
        return [_load(builder, unit, 32)]
    low, high = unpacked_unit(builder, storage, unit, scales)
    kind = ir.VectorType(BFloat(), 2 * LANES)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    halves = builder.call(_function(builder, name, kind, VECTOR, VECTOR), [high, low])
    halves = builder.bitcast(halves, _SHORTS)
    order = [place for lane in range(LANES) for place in (lane, LANES + lane)]
    mixed = builder.shuffle_vector(halves, halves, ir.VectorType(I32, 2 * LANES)(order))
    return [builder.bitcast(mixed, INTEGERS)]


def rounded(builder: ir.IRBuilder, storage: Storage, numbers: Iterable[Any]) -> Iterator[Any]:
    """Emit float32 numbers of a storage rounded to bfloat16, ties to even."""
    for each in numbers:
        if storage in (Storage.MXFP4, Storage.BFLOAT16):
            yield each  # it is exact
            continue
        bits = builder.bitcast(each, INTEGERS)
        odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
        near = builder.add(bits, builder.add(odd, _integers(0x7FFF)))
        yield builder.bitcast(builder.and_(near, _integers(0xFFFF0000)), VECTOR)


def emit_units(
    builder: ir.IRBuilder, storage: Storage, panels: list[Any], pairs: Any, as_pairs: bool,
    before: list[Any], step: Callable[[Any, list[Any], list[Any]], list[Any]],
) -> list[Any]:  # fmt: skip
    """Emit a loop over groups of panels, and in it one over units (`emit_loop`).

    panels: their addresses. step: emits a unit by its number, the scales of each panel and the
    vectors before it.
    """
    layout = LAYOUTS[storage]
    units = builder.lshr(pairs, I64(layout.unit_pairs.bit_length() - 1))
    per_group = I64(layout.group_pairs // layout.unit_pairs)

    def group_step(group: Any, vectors: list[Any]) -> list[Any]:
        first = builder.mul(group, per_group)
        left = builder.sub(units, first)
        count = builder.select(builder.icmp_signed("<", left, per_group), left, per_group)
        scales = [scales_of(builder, storage, each, pairs, group, as_pairs) for each in panels]

        def unit_step(number: Any, vectors: list[Any]) -> list[Any]:
            return step(builder.add(first, number), scales, vectors)

        return emit_loop(builder, count, vectors, unit_step)

    last = builder.add(units, builder.sub(per_group, I64(1)))
    return emit_loop(builder, builder.udiv(last, per_group), before, group_step)


def _unpack(*, rounds: bool, as_pairs: bool) -> Any:
    """Return the intrinsic that unpacks a panel: storage, its address, pairs, and where to.

    rounds: to bfloat16. as_pairs: to words of two (`HAS_PAIRS`).
    """

    def emit(builder: ir.IRBuilder, storage: Storage, panel: Any, pairs: Any, to: Any) -> None:
        layout = LAYOUTS[storage]
        unit_bytes = I64(layout.unit_pairs * (1 if as_pairs else 2) * _WORD)

        def step(unit: Any, scales: list[Any], _: list[Any]) -> list[Any]:
            at = builder.add(panel, builder.mul(unit, I64(layout.unit_bytes)))
            numbers: Iterable[Any]
            if as_pairs:
                numbers = unpacked_pairs(builder, storage, at, *scales)
            else:
                numbers = unpacked_unit(builder, storage, at, *scales)
                numbers = rounded(builder, storage, numbers) if rounds else numbers
            _store(builder, builder.add(to, builder.mul(unit, unit_bytes)), numbers)
            return []

        emit_units(builder, storage, [panel], pairs, as_pairs, [], step)

    @intrinsic
    def unpack(_: Any, storage: Any, panel: Any, pairs: Any, to: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
            for storage in LAYOUTS:
                with builder.if_then(builder.icmp_signed("==", args[0], I64(int(storage)))):
                    emit(builder, storage, *args[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return unpack


def _store(builder: ir.IRBuilder, to: Any, vectors: Iterable[Any]) -> None:
    """Emit stores of vectors one after the other."""
    for number, vector in enumerate(vectors):
        place = builder.add(to, I64(number * _WORD))
        builder.store(vector, pointer(builder, place, vector.type), align=4)


_MXFP4, _FP8, _, _INT8 = (int(each) for each in LAYOUTS)
_exact, _near = _unpack(rounds=False, as_pairs=False), _unpack(rounds=True, as_pairs=HAS_PAIRS)


@compiled
def panel_bytes(storage: int, pairs: int) -> int:
    """Return the bytes of a stored panel of `pairs` pairs of inputs."""
    if storage == _MXFP4:
        return (pairs + pairs // (MXFP4_GROUP // 2)) * LANES
    if storage in (_FP8, _INT8):
        return 2 * pairs * LANES + (2 * pairs + FP8_BLOCK - 1) // FP8_BLOCK * _WORD
    return pairs * _WORD


@compiled
def unpack_panel(storage: int, rounds: bool, panel: int, pairs: int, to: int) -> None:
    """Write a panel's numbers as float32 [2 * pairs, 16].

    rounds: to bfloat16, and to [pairs, 16, 2] of it on a processor that `HAS_PAIRS`.
    """
    if rounds:
        _near(storage, panel, pairs, to)
    else:
        _exact(storage, panel, pairs, to)
