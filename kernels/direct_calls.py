"""Direct calls: experts of another process of this machine, called from compiled code.

    caller (attention rank)                      server (expert rank)
    rows and pairs, in the call area
    request += 1, event  ──────────────────────> `serve_calls` waits in epoll
                                                 weighted sums, in the call area
    `decode_remote_layers` waits (futex)  <───── reply = request

Neither side runs the interpreter between layers. A call area is memory that both processes map; one
call at a time uses it. A reply that is late, or a call that the server declines, returns to the
caller's interpreter, which can use packets instead.

Shapes: T rows of a batch, U of them sent to one rank, N pairs, D model dim, K top-k, E experts, e
of one rank, R ranks, L layers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types

from kernels.compiled import (
    address_of,
    compiled,
    float32_at,
    int32_at,
    int64_at,
    now_ns,
    read_numbers,
    write_numbers,
)
from kernels.layer_ops import (
    BATCH_FIELDS,
    EXPERT_FIELDS,
    LAYER_FIELDS,
    MLP_FIELD,
    TOP_K_FIELD,
    WEIGHS_FIELD,
    add_rows,
    attend_layer,
    begin_sum,
    end_sum,
    run_layer_mlp,
    sum_experts,
    tables_of,
)
from kernels.replica_choice import choose_replicas
from kernels.row_ops import group_pairs
from kernels.thread_pool import FUTEX, atomic_read, atomic_write, syscall, yield_core

DONE, LATE, DECLINED = 0, 1, 2  # of a decode call; a server answers DONE or DECLINED

# Bytes of a call area: words that one side writes and the other one reads, in lines of their own.
REQUEST, REPLY, READY, _CALL, _ANSWER, _DATA = 0, 64, 128, 192, 256, 320
CALL_FIELDS: Final = 7  # generation, layer, U, N, batch, micro-batch, priority
ANSWER_FIELDS: Final = 2  # status, when it was complete
_SENT: Final = _CALL + 8 * CALL_FIELDS
PLACE_FIELDS: Final = 6  # area, addresses of x, rows, weights, counts, y
PEER_FIELDS: Final = PLACE_FIELDS + 2  # caller: event, e. server: most rows, most pairs
RECORD_FIELDS: Final = 9  # peer, batch, micro-batch, layer, U, N; when sent, started, complete
CLOCK_FIELDS: Final = 4  # ends of attention, sending, MLP, waiting
# Time since the first call after which the server's interpreter runs: at the end of a step, while
# the caller samples tokens, or between layers.
SERVED_AT_END_NS, SERVED_AT_ONCE_NS = 1_000_000, 20_000_000

_EVENTS: Final = 8  # of a wait; which ones does not matter
_EVENT_BYTES: Final = 16  # at most
_WAIT_SHARED, _WAKE_SHARED = 0, 1
_epoll_wait = types.ExternalFunction(
    "epoll_wait", types.int32(types.int32, types.int64, types.int32, types.int32)
)
_eventfd_write = types.ExternalFunction("eventfd_write", types.int32(types.int32, types.uint64))
_SECOND: Final = 1_000_000_000


class AreaLayout(NamedTuple):
    """Offsets and size of a call area, in bytes.

    x [U, D], rows int64 [N], weights float32 [N], counts int64 [e], y [U, D].
    """

    x: int
    rows: int
    weights: int
    counts: int
    y: int
    num_bytes: int

    @staticmethod
    def of(most_rows: int, most_pairs: int, row_bytes: int, experts: int) -> AreaLayout:
        """Return the layout for calls of at most this size."""
        ends = [_DATA]
        sizes = most_rows * row_bytes, 8 * most_pairs, 4 * most_pairs, 8 * experts
        for size in (*sizes, most_rows * row_bytes):
            ends.append(-(-(ends[-1] + size) // 64) * 64)
        return AreaLayout(*ends)

    def place(self, area: int) -> tuple[int, ...]:
        """Return the first PLACE_FIELDS of a peer whose area is at an address."""
        return area, *(area + offset for offset in self[:-1])


@compiled
def _wait_for(area: int, number: int, until_ns: int, spin_ns: int) -> bool:
    """Wait for the reply to a request, awake at first; return False if it is late."""
    time_left, spin_until_ns = np.empty(2, np.int64), now_ns() + spin_ns
    while True:
        seen = atomic_read(area + REPLY)
        if seen == number:
            return True
        now = now_ns()
        left_ns = until_ns - now
        if left_ns <= 0:
            return False
        if now < spin_until_ns:
            yield_core()
            continue
        time_left[0], time_left[1] = left_ns // _SECOND, left_ns % _SECOND
        syscall(FUTEX, area + REPLY, _WAIT_SHARED, seen, address_of(time_left))


@compiled
def _send_rows(
    peer: int, size: int, T: int, D: int, K: int, x: int, slots: int, weights: int, local: int,
    call: int, sent_rows: Any, sent: Any,
) -> None:  # fmt: skip
    """Send a rank the rows and pairs of its experts.

    Pairs are sorted by local expert, then by row. local: of each slot, as of `group_pairs`.
    sent_rows [T]: set to the rows of the batch. sent: set to U and N.
    """
    area, x_at, rows_at, weights_at, counts_at, _, event, e = carray(int64_at(peer), (PEER_FIELDS,))
    group_pairs(slots, weights, local, T * K, K, e, rows_at, weights_at, counts_at)
    counts, place_T, U, N = carray(int64_at(counts_at), (e,)), np.zeros(T, np.int64), 0, 0
    for expert in range(e):
        N += counts[expert]
    sent[0], sent[1] = 0, N
    if not N:
        return
    rows_N = carray(int64_at(rows_at), (N,))
    for n in range(N):
        place_T[rows_N[n]] = 1
    for t in range(T):
        if place_T[t]:
            source = carray(int32_at(x + t * D * size), (D * size // 4,))
            target = carray(int32_at(x_at + U * D * size), (D * size // 4,))
            for i in range(D * size // 4):
                target[i] = source[i]
            sent_rows[U], place_T[t] = t, U
            U += 1
    for n in range(N):
        rows_N[n] = place_T[rows_N[n]]
    fields, given = carray(int64_at(area + _CALL), (CALL_FIELDS,)), int64_at(call)
    for i in range(CALL_FIELDS):
        fields[i] = given[i]
    fields[2], fields[3], sent[0] = U, N, U
    carray(int64_at(area + _SENT), (1,))[0] = now_ns()
    atomic_write(area + REQUEST, atomic_read(area + REQUEST) + 1)
    _eventfd_write(np.int32(event), np.uint64(1))


@compiled
def _add_replies(
    peers: int, R: int, wide: bool, T: int, D: int, hidden: int, shared: int, sent_rows: Any,
    sent: Any,
) -> None:  # fmt: skip
    """Add the replies of all ranks to hidden, in the order of ranks, then shared experts' output.

    One rank's are added as they are, several parts are summed in float32 and rounded once. shared:
    address of [T, D], or 0.
    """
    peer_R = carray(int64_at(peers), (R, PEER_FIELDS))
    if R == 1 and not shared:
        add_rows(wide, hidden, wide, peer_R[0, 5], T, D)
        return
    size = 4 if wide else 2
    total, row = np.zeros(T * D + 1, np.float32), np.empty(D, np.float32)
    for rank in range(R):
        for u in range(sent[rank, 0]):
            first = sent_rows[rank, u] * D
            read_numbers(wide, peer_R[rank, 5] + u * D * size, D, row)
            for i in range(D):
                total[first + i] += row[i]
    for t in range(T):
        if shared:
            read_numbers(wide, shared + t * D * size, D, row)
            for i in range(D):
                total[t * D + i] += row[i]
        write_numbers(wide, address_of(row), D, total[t * D : t * D + D])
        add_rows(wide, hidden + t * D * size, wide, address_of(row), 1, D)
    total[0] = row[0] = np.float32(0.0)  # they live until here


CALLER_FIELDS: Final = 11
CHOICE_FIELDS: Final = 5  # experts E; addresses of sets of ranks, slots, result, counted pairs


@compiled
def decode_remote_layers(
    pool: int, tables: int, stop: int, first: int, last: int, resumes: bool, wait_ns: int,
    spin_ns: int,
) -> int:  # fmt: skip
    """Run layers [first, last) with remote experts; return the layer reached.

    tables: int64 R, and addresses of int64 tables: layers and batches as of `attend_layer`; choices
    [L, CHOICE_FIELDS] (`_choose_slots`); places [R], addresses of each slot's index on a rank
    (`group_pairs`); peers [R, PEER_FIELDS]; the call, CALL_FIELDS and the status, which is set if a
    layer's experts are not complete: LATE after wait_ns, or DECLINED; sent [L, R, 2], rows and
    pairs sent to each rank; sent_rows [R, T]; answered [L, R] and ends [L, CLOCK_FIELDS], in ns.
    resumes: the first layer's experts have been called. stop: as of `decode_layers`. spin_ns: time
    to wait awake.
    """
    call = carray(int64_at(tables), (CALLER_FIELDS,))[6]
    status = carray(int64_at(call + CALL_FIELDS * 8), (1,))
    status[0] = DONE
    for layer in range(first, last):
        if layer > first and atomic_read(stop):
            return layer
        if not resumes or layer > first:
            _call_experts(pool, tables, layer)
        status[0] = _await_replies(tables, layer, now_ns() + wait_ns, spin_ns)
        if status[0] != DONE:
            return layer
        _add_experts(tables, layer)
    return last


@compiled
def _call_experts(pool: int, tables: int, layer: int) -> None:
    """Run a layer's attention, send its rows, and run its MLP."""
    R, layers, batches, choices, places, peers, call, sent, sent_rows, _, clock = carray(
        int64_at(tables), (CALLER_FIELDS,)
    )
    layer_at, batch_at = layers + layer * LAYER_FIELDS * 8, batches + layer * BATCH_FIELDS * 8
    fixed, batch = tables_of(layer_at, batch_at)
    T, D, K, size = batch[0], fixed[1], fixed[TOP_K_FIELD], 4 if batch[11] else 2
    x = batch[14] if fixed[WEIGHS_FIELD] else batch[8]
    ends = carray(int64_at(clock + layer * CLOCK_FIELDS * 8), (CLOCK_FIELDS,))
    attend_layer(pool, layer_at, batch_at)
    ends[0] = now_ns()
    if K:
        slots = _choose_slots(choices + layer * CHOICE_FIELDS * 8, batch[9], T, K, R)
        carray(int64_at(call), (CALL_FIELDS,))[1] = layer
        sent_R2 = carray(int64_at(sent + layer * R * 16), (R, 2))
        sent_RT, local_R = carray(int64_at(sent_rows), (R, T)), carray(int64_at(places), (R,))
        for rank in range(R):
            _send_rows(
                peers + rank * PEER_FIELDS * 8, size, T, D, K, x, slots, batch[10], local_R[rank],
                call, sent_RT[rank], sent_R2[rank],
            )  # fmt: skip
    ends[1] = now_ns()
    run_layer_mlp(pool, layer_at, batch_at)
    ends[2] = now_ns()


@compiled
def _choose_slots(choice: int, ids: int, T: int, K: int, R: int) -> Any:
    """Write the slot of each pair [T, K], and return the address.

    choice: E; addresses of int64 sets of each expert's ranks (`choose_replicas`; 0: no replicas),
    of its slots [E, R] (without replicas: [E]), of the result, and of each slot's pairs so far.
    """
    E, sets, slots, result, _ = carray(int64_at(choice), (CHOICE_FIELDS,))
    ids_TK, slot_TK = carray(int64_at(ids), (T, K)), carray(int64_at(result), (T, K))
    if sets:
        sets_E, slot_ER = carray(int64_at(sets), (E,)), carray(int64_at(slots), (E, R))
        choose_replicas(ids_TK, np.ones(T), sets_E, slot_ER, 0, np.zeros(R), slot_TK)
        return result
    slot_E = carray(int64_at(slots), (E,))
    for t in range(T):
        for k in range(K):
            slot_TK[t, k] = slot_E[ids_TK[t, k]]
    return result


@compiled
def _await_replies(tables: int, layer: int, until_ns: int, spin_ns: int) -> int:
    """Wait for the replies of the ranks that were called; return DONE, LATE or DECLINED."""
    R, _, _, _, _, peers, _, sent, _, answered, clock = carray(int64_at(tables), (CALLER_FIELDS,))
    peer_R = carray(int64_at(peers), (R, PEER_FIELDS))
    sent_R2 = carray(int64_at(sent + layer * R * 16), (R, 2))
    answered_R = carray(int64_at(answered + layer * R * 8), (R,))
    for rank in range(R):
        if sent_R2[rank, 0]:
            area = peer_R[rank, 0]
            if not _wait_for(area, atomic_read(area + REQUEST), until_ns, spin_ns):
                return LATE
            answer = carray(int64_at(area + _ANSWER), (ANSWER_FIELDS,))
            answered_R[rank] = answer[1]
            if answer[0] != DONE:
                return DECLINED
    carray(int64_at(clock + layer * CLOCK_FIELDS * 8), (CLOCK_FIELDS,))[3] = now_ns()
    return DONE


@compiled
def _add_experts(tables: int, layer: int) -> None:
    """Add a layer's replies and MLP to the residual, and count its pairs."""
    R, layers, batches, choices, _, peers, _, sent, sent_rows, _, _ = carray(
        int64_at(tables), (CALLER_FIELDS,)
    )
    layer_at, batch_at = layers + layer * LAYER_FIELDS * 8, batches + layer * BATCH_FIELDS * 8
    fixed, batch = tables_of(layer_at, batch_at)
    T, D, wide, mlp_out = batch[0], fixed[1], batch[11] != 0, batch[13]
    total = begin_sum(layer_at, batch_at)
    if fixed[TOP_K_FIELD]:
        sent_RT = carray(int64_at(sent_rows), (R, T))
        sent_R2 = carray(int64_at(sent + layer * R * 16), (R, 2))
        shared = mlp_out if fixed[MLP_FIELD] else 0
        _add_replies(peers, R, wide, T, D, total, shared, sent_RT, sent_R2)
        choice = carray(int64_at(choices + layer * CHOICE_FIELDS * 8), (CHOICE_FIELDS,))
        slot_N = carray(int64_at(choice[3]), (T * fixed[TOP_K_FIELD],))
        for slot in slot_N:
            carray(int64_at(choice[4]), (slot + 1,))[slot] += 1
    else:
        add_rows(wide, total, wide, mlp_out, T, D)
    end_sum(layer_at, batch_at)


@compiled
def _find_experts(tables: int, count: int, call: Any, args: Any) -> Any:
    """Copy the EXPERT_FIELDS of a call's layer; return False without its experts.

    args[EXPERT_FIELDS]: set to whether it is the last layer.
    """
    table_G3 = carray(int64_at(tables), (count, 3))
    for g in range(count):
        if table_G3[g, 0] == call[0] and call[1] >= 0 and call[1] < table_G3[g, 2]:
            given = carray(int64_at(table_G3[g, 1] + call[1] * EXPERT_FIELDS * 8), (EXPERT_FIELDS,))
            for i in range(EXPERT_FIELDS):
                args[i] = given[i]
            args[EXPERT_FIELDS] = call[1] + 1 == table_G3[g, 2]
            return args[3] != 0
    return False


@compiled
def _serve(pool: int, peers: Any, calls: Any, members: Any, args: Any) -> int:
    """Compute calls of one layer at once, and write y of each; return their status.

    args: EXPERT_FIELDS of the layer, changed. Weights are read once for all. A row's bits do not
    depend on the rows beside it.
    """
    D, e, wide, M = args[1], args[3], args[15] != 0, len(members)
    words, U, N = D * (4 if wide else 2) // 4, 0, 0
    for n in members:
        U, N = U + calls[n, 2], N + calls[n, 3]
    x, sums = np.empty(U * words, np.int32), np.empty(U * D, np.float32)
    rows, weights = np.empty(N, np.int64), np.empty(N, np.float32)
    counts, next_M, first_M = np.zeros(e, np.int64), np.zeros(M, np.int64), np.zeros(M, np.int64)
    first = pairs = 0
    for m in range(M):
        first_M[m] = first
        source = carray(int32_at(peers[members[m], 1]), (calls[members[m], 2] * words,))
        for i in range(len(source)):
            x[first * words + i] = source[i]
        first += calls[members[m], 2]
    for expert in range(e):
        for m in range(M):
            n, before = members[m], pairs
            rows_N = carray(int64_at(peers[n, 2]), (calls[n, 3],))
            weights_N = carray(float32_at(peers[n, 3]), (calls[n, 3],))
            for _ in range(carray(int64_at(peers[n, 4]), (e,))[expert]):
                pair = next_M[m]
                if pair == len(rows_N) or rows_N[pair] < 0 or rows_N[pair] >= calls[n, 2]:
                    return DECLINED
                rows[pairs], weights[pairs] = first_M[m] + rows_N[pair], weights_N[pair]
                next_M[m], pairs = pair + 1, pairs + 1
            counts[expert] += pairs - before
    args[8], args[9], args[10], args[11] = U, N, address_of(x), address_of(rows)
    args[12], args[13], args[14] = address_of(weights), address_of(counts), address_of(sums)
    if not sum_experts(pool, address_of(args)):
        return DECLINED
    for m in range(M):
        n, at = members[m], first_M[m] * D
        write_numbers(wide, peers[n, 5], calls[n, 2] * D, sums[at:])
    x[0] = rows[0] = counts[0] = 0  # they live until here
    weights[0] = sums[0] = np.float32(0.0)
    return DONE


@compiled
def _read_call(peer: Any, priority: int, call: Any) -> Any:
    """Copy the call of an area, and its number; return False without one of these classes."""
    area = peer[0]
    call[CALL_FIELDS] = atomic_read(area + REQUEST)
    given = carray(int64_at(area + _CALL), (CALL_FIELDS,))
    for i in range(CALL_FIELDS):
        call[i] = given[i]
    return call[CALL_FIELDS] != atomic_read(area + REPLY) and call[6] <= priority


@compiled
def _fits(peer: Any, call: Any) -> Any:
    """Return whether a call is inside of its area."""
    return call[2] >= 1 and call[2] <= peer[6] and call[3] >= 1 and call[3] <= peer[7]


@compiled
def _find_members(peers: Any, calls: Any, n: int, priority: int, room: int, members: Any) -> int:
    """Write call n, and waiting ones of its layer and class; return their number."""
    members[0], M, pairs = n, 1, calls[n, 3]
    for other in range(n + 1, len(peers) if _fits(peers[n], calls[n]) else 0):
        call = calls[other]
        if room == M or not _read_call(peers[other], priority, call):
            continue
        is_alike = call[0] == calls[n, 0] and call[1] == calls[n, 1] and call[6] == calls[n, 6]
        if is_alike and _fits(peers[other], call) and pairs + call[3] <= peers[n, 7]:
            members[M], M, pairs = other, M + 1, pairs + call[3]
    return M


@compiled
def _reply(n: int, area: int, call: Any, status: int, start_ns: int, record: Any) -> Any:
    """Answer a call and record it; return the time."""
    done_ns = now_ns()
    answer = carray(int64_at(area + _ANSWER), (ANSWER_FIELDS,))
    answer[0], answer[1] = status, done_ns
    record[0], record[1], record[2], record[3] = n, call[4], call[5], call[1]
    record[4], record[5] = call[2], call[3]
    record[6] = carray(int64_at(area + _SENT), (1,))[0]
    record[7], record[8] = start_ns, done_ns
    atomic_write(area + REPLY, call[CALL_FIELDS])
    syscall(FUTEX, area + REPLY, _WAKE_SHARED, 1, 0)
    return done_ns


@compiled
def serve_calls(
    pool: int, peers: int, count: int, tables: int, generations: int, priority: int, epoll: int,
    wait_ms: int, spin_ns: int, records: int, room: int,
) -> int:  # fmt: skip
    """Serve calls of priority classes up to `priority`; return how many were served.

    Returns after wait_ms without a call, at any other event of the epoll descriptor, if `room`
    calls were served, and some time after the first. Waiting calls of one layer and class
    are computed together; their records have the same start. peers: int64 [count, PEER_FIELDS].
    tables: int64 [generations, 3]: number, address of EXPERT_FIELDS of each layer, number of layers
    up to the last one with experts.
    records: int64 [room, RECORD_FIELDS], written per call.
    """
    peer_NF = carray(int64_at(peers), (count, PEER_FIELDS))
    record_NF = carray(int64_at(records), (room, RECORD_FIELDS))
    events = np.empty(_EVENTS * _EVENT_BYTES, np.int8)
    calls = np.empty((count, CALL_FIELDS + 1), np.int64)
    args = np.empty(EXPERT_FIELDS + 1, np.int64)
    members, served, since_ns, spin_until_ns = np.empty(count, np.int64), 0, 0, now_ns() + spin_ns
    while True:
        is_idle = True
        for n in range(count):
            if not _read_call(peer_NF[n], priority, calls[n]):
                continue
            is_idle, start_ns, status = False, now_ns(), DECLINED
            since_ns = since_ns or start_ns
            args[EXPERT_FIELDS] = 0
            M = _find_members(peer_NF, calls, n, priority, room - served, members)
            if _fits(peer_NF[n], calls[n]) and _find_experts(tables, generations, calls[n], args):
                status = _serve(pool, peer_NF, calls, members[:M], args)
            for member in members[:M]:
                area, record = peer_NF[member, 0], record_NF[served]
                done_ns = _reply(member, area, calls[member], status, start_ns, record)
                served += 1
            spin_until_ns = done_ns + spin_ns
            most_ns = SERVED_AT_END_NS if args[EXPERT_FIELDS] else SERVED_AT_ONCE_NS
            if served == room or done_ns - since_ns > most_ns:
                return served
        if is_idle:
            if wait_ms <= 0:
                return served
            is_awake = now_ns() < spin_until_ns
            found = _epoll_wait(
                np.int32(epoll),
                address_of(events),
                np.int32(_EVENTS),
                np.int32(0 if is_awake else wait_ms),
            )
            if found == 0 and is_awake:
                yield_core()
            elif found <= 0 or _are_idle(peer_NF, count):
                events[0] = args[0] = 0  # they live until here
                return served


@compiled
def _are_idle(peer_NF: Any, count: int) -> bool:
    for n in range(count):
        if atomic_read(peer_NF[n, 0] + REQUEST) != atomic_read(peer_NF[n, 0] + REPLY):
            return False
    return True
