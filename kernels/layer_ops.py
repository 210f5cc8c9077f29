"""Whole calls for a layer of a decode batch, compiled: attention, router, MLPs and experts.

Each row is computed by itself in a fixed order, so its bits do not depend on the batch or on
threads. Numbers are float32 or bfloat16 (`wide` False), and computed in float32.

Shapes: T rows, D model dim, H heads, G KV heads, d head dim.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from kernels.attention_ops import attend
from kernels.compiled import (
    address_of,
    compiled,
    float32_at,
    float_of_bits,
    int64_at,
    now_ns,
    read_numbers,
    rounded_number,
    uint16_at,
    write_numbers,
)
from kernels.panels import (
    add_weighted,
    multiply,
    multiply_heads,
    reads_float32,
    run_experts,
    run_mlp,
)
from kernels.row_ops import (
    choose_experts,
    clip,
    gate_rows,
    group_pairs,
    norm_and_rope,
    norm_rows,
    rms_norm,
    scale_rows,
    write_rows,
)
from kernels.thread_pool import PartNumber, atomic_read, register_part, run_parts

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

LAYER_FIELDS: Final = 31
TOP_K_FIELD, WEIGHS_FIELD, MLP_FIELD, SUM_NORM_FIELD = 20, 21, 23, 30
PROJECTION_NORM, TURNED_NORM = 1, 2
LATENT_FIELDS: Final = 16
MLP_FIELDS: Final = 5
LATENT_EPS: Final = 1e-6  # of the norms of q and latent, fixed as in `transformers`
BATCH_FIELDS: Final = 17


@compiled
def attend_layer(pool: int, layer: int, batch: int) -> None:
    """Run attention of a decode batch, the next norm, and the router.

    hidden [T, D] is changed in place. layer: int64 arithmetic, D, H, G, d, bits of eps, kind of
    norms (`norm_rows`); addresses of the attention norm, q/k/v and its bias, q/k norm, o and its
    bias, sinks, MLP norm; window; arithmetic and addresses of the router and its bias, of its rule
    (`choose_experts`), and top_k (0: no experts); whether it weighs the experts' input; address of
    the fields of `_attend_latents` (0: none), with which d is a value's, and G, q/k/v and q/k norm
    are 0; address of the fields of `run_layer_mlp`; kind of the q/k norm (0: of heads); bits of the
    limit of q, k and v (0: none); size of a value; addresses of the gate and its bias, and of the
    norms of attention's and the MLP's output (`begin_sum`; 0: none). batch: int64 T; addresses of
    hidden, cos, sin, slots, entries (`attend`), K pool, V pool, and of the results: the second
    norm's output [T, D], ids and weights [T, top_k]; whether numbers are float32; bits of scale;
    addresses of the MLP's output [T, D], of the experts' input [T, D], if it is weighed, and of
    float32 factors of queries [T] (0: none), of `begin_sum`'s result [T, D].
    """
    (
        kind, D, H, _, _, eps_bits, norm_kind, norm, _, _, _, o, o_bias, _, mlp_norm, window,
        router_kind, router, router_bias, rule, top_k, weighs, latent, _, _, _, v, gate, gate_bias,
        out_norm, _,
    ) = carray(int64_at(layer), (LAYER_FIELDS,))  # fmt: skip
    (
        T, hidden, _, _, _, _, _, _, out, ids, weights, is_wide, _, _, weighed, _, _,
    ) = carray(int64_at(batch), (BATCH_FIELDS,))  # fmt: skip
    wide, eps = is_wide != 0, float_of_bits(eps_bits)
    x, fresh = np.empty(1 + T * max(D, H * v), np.float32), np.empty(1 + T * D, np.float32)
    x_at, fresh_at = address_of(x), address_of(fresh)
    gates = np.empty(1 + (T * H * v if gate else 0), np.float32)
    norm_rows(wide, norm_kind, hidden, D, norm, x_at, T, D, eps)
    if gate:
        multiply(pool, kind, x_at, gate, gate_bias, address_of(gates), T, D, H * v)
    if latent:
        _attend_latents(pool, kind, latent, batch, x_at, D, H, window)
    else:
        _attend_heads(pool, layer, batch, x_at)
    if gate:
        gate_rows(wide, address_of(gates), x_at, T * H * v)
    multiply(pool, kind, x_at, o, o_bias, fresh_at, T, H * v, D)
    if out_norm:
        norm_rows(wide, norm_kind, fresh_at, D, out_norm, fresh_at, T, D, eps)
    add_rows(wide, hidden, wide, fresh_at, T, D)
    norm_rows(wide, norm_kind, hidden, D, mlp_norm, out, T, D, eps)
    if top_k:
        _route(pool, router_kind, router, router_bias, rule, top_k, wide, out, T, D, ids, weights)
    if weighs:
        numbers = carray(float32_at(weights), (T * top_k,))
        for t in range(T * top_k):
            numbers[t] = rounded_number(wide, numbers[t])
        scale_rows(wide, out, D, weights, weighed, D, T, D)
        for t in range(T * top_k):
            numbers[t] = _ONE
    x[0] = fresh[0] = gates[0] = _ZERO  # they live until here


@compiled
def tables_of(layer: int, batch: int) -> Any:
    """Return the tables of `attend_layer` as arrays."""
    return carray(int64_at(layer), (LAYER_FIELDS,)), carray(int64_at(batch), (BATCH_FIELDS,))


@compiled
def begin_sum(layer: int, batch: int) -> Any:
    """Return the address of what the experts and the MLP are added to: hidden, or zeros."""
    fields, args = tables_of(layer, batch)
    if not fields[SUM_NORM_FIELD]:
        return args[1]
    count = args[0] * fields[1] * (4 if args[11] else 2) // 2
    zeros = carray(uint16_at(args[16]), (count,))
    for i in range(count):
        zeros[i] = 0
    return args[16]


@compiled
def end_sum(layer: int, batch: int) -> None:
    """Add the norm of the sum to hidden, if it is not hidden itself."""
    fields, args = tables_of(layer, batch)
    wide, T, D, norm, total = args[11] != 0, args[0], fields[1], fields[SUM_NORM_FIELD], args[16]
    if norm:
        norm_rows(wide, fields[6], total, D, norm, total, T, D, float_of_bits(fields[5]))
        add_rows(wide, args[1], wide, total, T, D)


@compiled
def _attend_heads(pool: int, layer: int, batch: int, x: int) -> None:
    """Replace rows x [T, D] by grouped-query attention [T, H * v] (`attend_layer`)."""
    (
        kind, D, H, G, d, eps_bits, _, _, qkv, qkv_bias, qk_norm, _, _, sinks, _, window, _, _, _,
        _, _, _, _, _, norm_kind, limit, v, _, _, _, _,
    ) = carray(int64_at(layer), (LAYER_FIELDS,))  # fmt: skip
    (
        T, _, cos, sin, slots, entries, k_pool, v_pool, _, _, _, is_wide, scale, _, _, factors, _,
    ) = carray(int64_at(batch), (BATCH_FIELDS,))  # fmt: skip
    wide, eps, row = is_wide != 0, float_of_bits(eps_bits), (H + G) * d + G * v
    size = 4 if wide else 2
    fresh = np.empty(1 + T * row, np.float32)
    qk = np.empty(1 + T * (H + G) * d, np.float32)
    fresh_at, qk_at = address_of(fresh), address_of(qk)
    multiply(pool, kind, x, qkv, qkv_bias, fresh_at, T, D, row)
    if norm_kind == PROJECTION_NORM:
        for first, heads in ((0, H), (H, G)):
            at, weight = fresh_at + first * d * size, qk_norm + first * d * size
            rms_norm(wide, at, row, weight, at, T, heads * d, eps, False)
    if limit:
        clip(wide, fresh_at, T * row, float_of_bits(limit))
    norm_and_rope(
        wide, fresh_at, row, d, 0 if norm_kind else qk_norm, cos, sin, qk_at,
        (H + G) * d, d, T, H + G, d, eps,
    )  # fmt: skip
    if norm_kind == TURNED_NORM:
        for t in range(T):
            for first, heads in ((0, H), (H, G)):
                at = qk_at + (t * (H + G) + first) * d * size
                rms_norm(wide, at, d, qk_norm + first * d * size, at, heads, d, eps, False)
    if factors:
        scale_rows(wide, qk_at, (H + G) * d, factors, qk_at, (H + G) * d, T, H * d)
    keys, values = qk_at + H * d * size, fresh_at + (H + G) * d * size
    write_rows(size, keys, (H + G) * d, slots, k_pool, T, G * d)
    write_rows(size, values, row, slots, v_pool, T, G * v)
    attend(
        pool, wide, qk_at, (H + G) * d, k_pool, v_pool, G * d, G * v, x, entries, T, H, G, d, v,
        window, float_of_bits(scale), sinks,
    )  # fmt: skip
    fresh[0] = qk[0] = _ZERO  # they live until here


@compiled
def _route(
    pool: int, kind: int, router: int, bias: int, rule: int, top_k: int, wide: bool, x: int, T: int,
    D: int, ids: int, weights: int,
) -> None:  # fmt: skip
    """Choose experts of rows x [T, D], for a router that may read float32 where x is bfloat16."""
    E, is_widened = carray(int64_at(rule), (1,))[0], reads_float32(kind) and not wide
    logits, rows = np.empty(1 + T * E, np.float32), np.empty(1 + T * D * is_widened, np.float32)
    if is_widened:
        read_numbers(False, x, T * D, rows)
    rows_at, logits_at = address_of(rows) if is_widened else x, address_of(logits)
    multiply(pool, kind, rows_at, router, bias, logits_at, T, D, E)
    choose_experts(reads_float32(kind), rule, logits_at, T, top_k, False, ids, weights)
    logits[0] = rows[0] = _ZERO  # they live until here


@compiled
def run_layer_mlp(pool: int, layer: int, batch: int) -> None:
    """Run the shared experts or the dense MLP of a layer, if it has any (`attend_layer`).

    Fields: int64 arithmetic; addresses of gate_up, down, and gate of the output (`run_mlp`); F.
    """
    fields, args = tables_of(layer, batch)
    if fields[MLP_FIELD]:
        kind, gate_up, down, gate, F = carray(int64_at(fields[MLP_FIELD]), (MLP_FIELDS,))
        run_mlp(pool, kind, args[8], gate_up, down, gate, args[13], args[0], fields[1], F)


@compiled
def _attend_latents(
    pool: int, kind: int, latent: int, batch: int, x: int, D: int, H: int, window: int
) -> None:
    """Replace rows x [T, D] by attention over latents [T, H * v] (kernels/latent_attention.py).

    latent: int64 n, p, v, r and the rank of queries (0: projected directly); addresses of q_a, its
    bias and norm, of q, kv_a and its bias and norm, of up_k and up_v, each followed by the bytes of
    a head's panels.
    """
    (
        n, p, v, r, q_rank, q_a, q_a_bias, q_norm, q, kv_a, kv_a_bias, kv_norm, up_k, k_bytes, up_v,
        v_bytes,
    ) = carray(int64_at(latent), (LATENT_FIELDS,))  # fmt: skip
    (
        T, _, cos, sin, slots, entries, entry_pool, _, _, _, _, is_wide, scale, _, _, _, _,
    ) = carray(int64_at(batch), (BATCH_FIELDS,))  # fmt: skip
    wide, d, C = is_wide != 0, n + p, r + p
    size = 4 if wide else 2
    fresh, low = np.empty(1 + T * C, np.float32), np.empty(1 + T * q_rank, np.float32)
    plain, queries = np.empty(1 + T * H * d, np.float32), np.empty(1 + T * H * C, np.float32)
    sums = np.empty(1 + T * H * r, np.float32)
    fresh_at, low_at, plain_at = address_of(fresh), address_of(low), address_of(plain)
    queries_at, sums_at, last = address_of(queries), address_of(sums), r * size
    multiply(pool, kind, x, kv_a, kv_a_bias, fresh_at, T, D, C)
    rms_norm(wide, fresh_at, C, kv_norm, fresh_at, T, r, LATENT_EPS, False)
    turned = fresh_at + last
    norm_and_rope(wide, turned, C, p, 0, cos, sin, turned, C, p, T, 1, p, 0.0)
    write_rows(size, fresh_at, C, slots, entry_pool, T, C)
    if q_rank:
        multiply(pool, kind, x, q_a, q_a_bias, low_at, T, D, q_rank)
        rms_norm(wide, low_at, q_rank, q_norm, low_at, T, q_rank, LATENT_EPS, False)
        multiply(pool, kind, low_at, q, 0, plain_at, T, q_rank, H * d)
    else:
        multiply(pool, kind, x, q, 0, plain_at, T, D, H * d)
    multiply_heads(
        pool, kind, plain_at, H * d * size, d * size, up_k, k_bytes, queries_at, H * C * size,
        C * size, T, n, r, H,
    )  # fmt: skip
    norm_and_rope(
        wide, plain_at + n * size, H * d, d, 0, cos, sin, queries_at + last, H * C, C, T, H, p, 0.0
    )
    attend(
        pool, wide, queries_at, H * C, entry_pool, entry_pool, C, C, sums_at, entries, T, H, 1, C,
        r, window, float_of_bits(scale), 0,
    )  # fmt: skip
    multiply_heads(
        pool, kind, sums_at, H * last, last, up_v, v_bytes, x, H * v * size, v * size, T, r, v, H
    )
    fresh[0] = low[0] = plain[0] = queries[0] = sums[0] = _ZERO  # they live until here


@compiled
def add_rows(wide: bool, total: int, part_wide: bool, part: int, T: int, D: int) -> None:
    """Add part to total, both [T, D], of numbers that are float32 if wide."""
    size, part_size = 4 if wide else 2, 4 if part_wide else 2
    left, right = np.empty(D, np.float32), np.empty(D, np.float32)
    for t in range(T):
        read_numbers(wide, total + t * D * size, D, left)
        read_numbers(part_wide, part + t * D * part_size, D, right)
        for i in range(D):
            left[i] += right[i]
        write_numbers(wide, total + t * D * size, D, left)


EXPERT_FIELDS: Final = 16


@compiled
def add_experts(pool: int, args: int) -> None:
    """Add each row's weighted sum over its local experts to hidden [T, D].

    args: int64 arithmetic, D, F, e; addresses of gate_up and down int64 [e, 2]; bits of alpha and
    limit (`run_experts`); T, top_k; addresses of x, ids, weights (`group_pairs`), local, hidden;
    whether numbers are float32.
    """
    (
        kind, D, F, e, gate_up, down, alpha, limit, T, top_k, x, ids, weights, local, hidden,
        is_wide,
    ) = carray(int64_at(args), (EXPERT_FIELDS,))  # fmt: skip
    N = T * top_k
    rows, sorted_N = np.empty(N + 1, np.int64), np.empty(N + 1, np.float32)
    counts = np.zeros(e + 1, np.int64)
    y, sums = np.empty(N * D + 1, np.float32), np.zeros(T * D + 1, np.float32)
    rows_at, sorted_at, y_at = address_of(rows), address_of(sorted_N), address_of(y)
    sums_at = address_of(sums)
    group_pairs(ids, weights, local, N, top_k, e, rows_at, sorted_at, address_of(counts))
    _run_grouped(
        pool, kind, D, F, e, gate_up, down, alpha, limit, x, rows_at, sorted_at, counts, y_at,
        sums_at,
    )  # fmt: skip
    add_rows(is_wide != 0, hidden, True, sums_at, T, D)
    rows[0] = 0  # they live until here
    sorted_N[0] = y[0] = sums[0] = _ZERO


@compiled
def _run_grouped(
    pool: int, kind: int, D: int, F: int, e: int, gate_up: int, down: int, alpha: int, limit: int,
    x: int, rows: int, weights: int, counts: Any, y: int, sums: int,
) -> None:  # fmt: skip
    """Add weighted outputs of pairs, counts[i] of expert i, to sums. Changes counts [e + 1].

    y: room for [N, D] float32.
    """
    experts, used, pairs = np.empty(e + 1, np.int64), 0, 0
    for expert in range(e):
        if counts[expert]:
            experts[used], counts[used] = expert, counts[expert]
            pairs += counts[used]
            used += 1
    run_experts(
        pool, kind, x, rows, gate_up, down, address_of(experts), address_of(counts), used, D, F,
        float_of_bits(alpha), float_of_bits(limit), y,
    )  # fmt: skip
    add_weighted(pool, rows, weights, y, sums, pairs, D)
    counts[e] = experts[e] = 0  # they live until here


@compiled
def sum_experts(pool: int, args: int) -> bool:
    """Write the weighted sums of pairs that are sorted by expert to out [U, D] float32.

    args: as of `add_experts` up to limit; U, N; addresses of x [U, D], rows int64 [N], weights
    float32 [N], counts int64 [e], out. Returns False if pairs are outside of the rows.
    """
    (
        kind, D, F, e, gate_up, down, alpha, limit, U, N, x, rows, weights, given, out, _,
    ) = carray(int64_at(args), (EXPERT_FIELDS,))  # fmt: skip
    rows_N, given_e = carray(int64_at(rows), (N,)), carray(int64_at(given), (e,))
    counts, left = np.zeros(e + 1, np.int64), N
    for expert in range(e):
        counts[expert] = given_e[expert]
        left -= counts[expert]
        if counts[expert] < 0:
            return False
    for n in range(N):
        if rows_N[n] < 0 or rows_N[n] >= U:
            return False
    if left:
        return False
    sums, y = carray(float32_at(out), (U * D,)), np.empty(N * D + 1, np.float32)
    for i in range(U * D):
        sums[i] = _ZERO
    _run_grouped(
        pool, kind, D, F, e, gate_up, down, alpha, limit, x, rows, weights, counts,
        address_of(y), out,
    )  # fmt: skip
    y[0] = _ZERO  # it lives until here
    return True


CLOCK_FIELDS: Final = 3  # ends of attention, MLP, experts


@compiled
def decode_layers(
    pool: int, layers: int, batches: int, experts: int, clock: int, stop: int, first: int, last: int
) -> int:
    """Run layers [first, last), of tables with a row for each; return the layer reached.

    `attend_layer`, `run_layer_mlp`, `add_experts`. clock: int64 [L, CLOCK_FIELDS] ns. stop: address
    of an int64 that ends the call after a layer if it is not 0.
    """
    for number in range(first, last):
        if number > first and atomic_read(stop):
            return number
        layer, batch = layers + number * LAYER_FIELDS * 8, batches + number * BATCH_FIELDS * 8
        fields, args = tables_of(layer, batch)
        ends = carray(int64_at(clock + number * CLOCK_FIELDS * 8), (CLOCK_FIELDS,))
        attend_layer(pool, layer, batch)
        ends[0] = now_ns()
        run_layer_mlp(pool, layer, batch)
        ends[1] = now_ns()
        total = begin_sum(layer, batch)
        if fields[TOP_K_FIELD]:
            given = experts + number * EXPERT_FIELDS * 8
            carray(int64_at(given), (EXPERT_FIELDS,))[14] = total
            add_experts(pool, given)
        if fields[MLP_FIELD]:
            wide = args[11] != 0
            add_rows(wide, total, wide, args[13], args[0], fields[1])
        end_sum(layer, batch)
        ends[2] = now_ns()
    return last


HEAD_FIELDS: Final = 9


@compiled
def _logits_part(args: int, begin: int, end: int) -> None:
    """Write logits and best places of rows [begin, end) of the head's output (`finish_rows`)."""
    wide, numbers, V, scale, logits, best = carray(int64_at(args), (6,))
    factor, size = np.float32(float_of_bits(scale)), 4 if wide else 2
    for r in range(begin, end):
        row, place = carray(float32_at(logits + r * V * 4), (V,)), 0
        read_numbers(wide != 0, numbers + r * V * size, V, row)
        for v in range(V):
            row[v] *= factor
        for v in range(V):
            if not row[v] <= row[place]:
                place = v
                if row[v] != row[v]:
                    break
        carray(int64_at(best), (end,))[r] = place


_READ_LOGITS: Final = register_part(PartNumber.READ_LOGITS, _logits_part)


@compiled
def finish_rows(
    pool: int, head: int, hidden: int, rows: int, R: int, logits: int, best: int
) -> None:
    """Write the logits of rows of hidden, float32 [R, V], and the place of each one's largest.

    That of a NaN, if there is one. head: int64 arithmetic, D, V, kind of the norm, bits of eps and
    of the logits' factor; addresses of the norm, the head and its bias. rows, best: int64 [R].
    """
    kind, D, V, norm_kind, eps, scale, norm, weight, bias = carray(int64_at(head), (HEAD_FIELDS,))
    wide, rows_R = reads_float32(kind), carray(int64_at(rows), (R,))
    size = 4 if wide else 2
    x = np.empty(1 + R * D, np.float32)
    numbers = np.empty(1 if wide else 1 + R * V // 2, np.float32)
    x_at, numbers_at = address_of(x), logits if wide else address_of(numbers)
    for r in range(R):
        row, at = hidden + rows_R[r] * D * size, x_at + r * D * size
        norm_rows(wide, norm_kind, row, D, norm, at, 1, D, float_of_bits(eps))
    multiply(pool, kind, x_at, weight, bias, numbers_at, R, D, V)
    args = np.array((np.int64(wide), numbers_at, V, scale, logits, best))
    run_parts(pool, _READ_LOGITS, args, R, 1)
    x[0] = numbers[0] = _ZERO  # they live until here
