"""Gated delta net and Kimi's delta attention of the CPU, compiled: a layer but its projections.

Each sequence is computed token by token by itself, so its bits depend neither on the batch nor on
how a prompt is cut. Numbers are float32 or bfloat16 (`wide` False), and computed in float32.

Shapes: T rows, G key heads, R value heads per key head, k and v their dims, w = 2k + R v, A decays
of a key head: R, or k, one for each row of a state (R = 1).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from kernels.compiled import (
    compiled,
    exp,
    float32_at,
    float_of_bits,
    int64_at,
    read_numbers,
    rounded_number,
    write_numbers,
)
from kernels.thread_pool import PartNumber, register_part, run_parts

LAYER_FIELDS: Final = 12
CALL_FIELDS: Final = 4
ENTRY_COLUMNS: Final = 4
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_EPS, _LINEAR = np.float32(1e-6), np.float32(20.0)


@compiled
def _silu(x: Any) -> Any:
    return x / (_ONE + exp(-x))


@compiled
def _soften(x: Any) -> Any:
    return x if x > _LINEAR else np.float32(np.log1p(exp(x)))


@compiled
def _sum_of_squares(x: Any) -> Any:
    total = _ZERO
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@compiled
def _convolve(wide: bool, window: Any, weight: Any, mixed: Any) -> None:
    """Write silu of the convolution over the rows of a window, and drop its first row."""
    taps, w = window.shape
    for i in range(w):
        mixed[i] = window[0, i] * weight[0, i]
    for tap in range(1, taps):
        for i in range(w):
            mixed[i] += window[tap, i] * weight[tap, i]
    for i in range(w):
        mixed[i] = rounded_number(wide, _silu(rounded_number(wide, mixed[i])))
    for tap in range(1, taps):
        for i in range(w):
            window[tap - 1, i] = window[tap, i]


@compiled
def _step(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, read: Any, out: Any) -> None:
    """Decay rows of the state [k, v], correct what it answers to k towards v, and read it at q."""
    keys, values = state.shape
    for j in range(values):
        read[j] = out[j] = _ZERO
    for i in range(keys):
        for j in range(values):
            state[i, j] *= decay[i]
            read[j] += state[i, j] * k[i]
    for j in range(values):
        read[j] = (v[j] - read[j]) * beta
    for i in range(keys):
        for j in range(values):
            state[i, j] += k[i] * read[j]
            out[j] += state[i, j] * q[i]


@compiled
def _advance_part(args: int, begin: int, end: int) -> None:
    """Advance units [begin, end): unit n is key head n % G of entry n // G."""
    if begin >= end:
        return
    layer, x, entries, out = carray(int64_at(args), (CALL_FIELDS,))
    is_wide, G, R, K, V, taps, conv, rates, biases, norm, eps_bits, by_row = carray(
        int64_at(layer), (LAYER_FIELDS,)
    )
    A = K if by_row else R
    wide, size, w, eps = is_wide != 0, 4 if is_wide else 2, 2 * K + R * V, float_of_bits(eps_bits)
    per_head = w + R * V
    row = G * (per_head + R + A)  # elements of a row of x
    table = carray(int64_at(entries), (end, ENTRY_COLUMNS))
    weight, window = np.empty((taps, w), np.float32), np.empty((taps, w), np.float32)
    mixed, gates = np.empty(w, np.float32), np.empty(R + A, np.float32)
    decay = np.empty(K, np.float32)
    q, k = mixed[:K], mixed[K : 2 * K]
    rows_V = np.empty((4, V), np.float32)
    read, result, z, norm_V = rows_V[0], rows_V[1], rows_V[2], rows_V[3]
    read_numbers(wide, norm, V, norm_V)
    for unit in range(begin, end):
        g = unit % G
        first, count, kept, states = table[unit // G]
        kept += g * (taps - 1) * w * size
        read_numbers(wide, conv + g * taps * w * size, taps * w, weight.ravel())
        read_numbers(wide, kept, (taps - 1) * w, window.ravel())
        rate_R = carray(float32_at(rates + g * R * 4), (R,))
        bias_A = carray(float32_at(biases + g * A * 4), (A,))
        for t in range(first, first + count):
            at = x + t * row * size
            read_numbers(wide, at + g * per_head * size, w, window[taps - 1])
            _convolve(wide, window, weight, mixed)
            q_scale = _ONE / np.sqrt(_sum_of_squares(q) + _EPS) / np.sqrt(np.float32(K))
            k_scale = _ONE / np.sqrt(_sum_of_squares(k) + _EPS)
            for i in range(K):
                q[i] *= q_scale
                k[i] *= k_scale
            read_numbers(wide, at + (G * per_head + g * (R + A)) * size, R + A, gates)
            for r in range(R):
                state = carray(float32_at(states + (g * R + r) * K * V * 4), (K, V))
                beta = rounded_number(wide, _ONE / (_ONE + exp(-gates[r])))
                if by_row:
                    for i in range(K):
                        decay[i] = exp(-rate_R[r] * _soften(gates[R + i] + bias_A[i]))
                else:
                    decay[:] = exp(-rate_R[r] * _soften(gates[R + r] + bias_A[r]))
                v = mixed[2 * K + r * V : 2 * K + (r + 1) * V]
                _step(state, q, k, v, decay, beta, read, result)
                read_numbers(wide, at + (g * per_head + w + r * V) * size, V, z)
                for j in range(V):
                    result[j] = rounded_number(wide, result[j])
                scale = _ONE / np.sqrt(_sum_of_squares(result) / np.float32(V) + np.float32(eps))
                if by_row:
                    for j in range(V):
                        result[j] = result[j] * scale * norm_V[j] / (_ONE + exp(-z[j]))
                else:
                    for j in range(V):
                        normed = rounded_number(
                            wide, rounded_number(wide, result[j] * scale) * norm_V[j]
                        )
                        result[j] = normed * _silu(z[j])
                write_numbers(wide, out + (t * G * R + g * R + r) * V * size, V, result)
        write_numbers(wide, kept, (taps - 1) * w, window[: taps - 1].ravel())


_ADVANCE: Final = register_part(PartNumber.ADVANCE, _advance_part)


@compiled
def advance(pool: int, layer: int, x: int, entries: int, count: int, G: int, out: int) -> None:
    """Advance states by rows of x, and write the gated and normed outputs [T, G R, v].

    layer: int64 whether numbers are float32, G, R, k, v, taps; addresses of the convolution
    [G, taps, w], rates float32 [G, R] and biases [G, A] of the decay, norm [v]; bits of eps;
    whether decays are by row of a state, with which the gate is a sigmoid of z and the norm is
    not rounded. x: rows of q, k, v and z of each key head [G, 2k + 2Rv], then b and a of each
    [G, R + A]. entries: int64
    [count, ENTRY_COLUMNS]: first row, rows, address of the last taps - 1 inputs [G, taps - 1, w],
    of the states float32 [G R, k, v]; no two share these.
    """
    run_parts(pool, _ADVANCE, np.array((layer, x, entries, out)), count * G, 1)
