"""Methods side by side on the layers of traces: what each makes of texts held out.

Shapes: L layers, R ranks.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.placement.clusters import k_means
from benchmarks.placement.cross_entropy import cross_entropy
from benchmarks.placement.others import eplb, load_alone
from benchmarks.placement.synthetic import routing_of
from benchmarks.placement.traces import Traces
from planner.arrays import Ints
from planner.placement.routing import LayerRouting, local_fraction, measure, token_ranks
from planner.placement.slots import Line, contiguous_line, held, layer_slots
from planner.placement.solve import solve_layer

TIME_FACTOR = 4  # times our time, beside our time, for methods that can use it
Method = Callable[[LayerRouting, Sequence[int]], tuple[Line, Ints | None]]


class Judged(NamedTuple):
    """local: LAR by the token table made of the placement; own_local: by the method's own labels.
    seconds: of this process."""

    copies: float
    load: float
    batch_load: float
    local: float
    own_local: float
    seconds: float


def layers_of(traces: Traces, num_experts: int, tokens: int | None = None) -> list[LayerRouting]:
    """Of the first tokens, or all: a routing of each layer."""
    ids_P = traces.ids_P2[:tokens, 0].astype(np.int64)
    paths_PLK = traces.paths_PLK[:tokens].astype(np.int64)
    return [
        routing_of(num_experts, paths_PLK[:, layer], ids_P) for layer in range(paths_PLK.shape[1])
    ]


def even(num_experts: int, ranks: int, spare: int = 0) -> list[int]:
    """Slots per rank."""
    return [num_experts // ranks + (rank < num_experts % ranks) + spare for rank in range(ranks)]


def judged(
    method: Method, train: LayerRouting, test: LayerRouting, slots_per_rank: Sequence[int]
) -> tuple[Judged, Line]:
    start = time.process_time()
    line, own_V = method(train, slots_per_rank)
    seconds = time.process_time() - start
    table_V = token_ranks(train.counts, held(line, slots_per_rank, train.num_experts))
    placed = layer_slots(line, slots_per_rank)
    found = measure(test, placed)
    local = _local(test, line, slots_per_rank, table_V)
    own = local if own_V is None else _local(test, line, slots_per_rank, own_V)
    return Judged(found.copies, found.load, found.batch_load, local, own, seconds), line


def _local(test: LayerRouting, line: Line, slots_per_rank: Sequence[int], label_V: Ints) -> float:
    """Of ids that the table has not, as if they were on rank 0."""
    size = max(int(test.ids_P.max()) + 1, len(label_V))
    ranks_V = np.zeros(size, np.int64)
    ranks_V[: len(label_V)] = label_V
    return local_fraction(test, layer_slots(line, slots_per_rank), ranks_V)


def in_order(routing: LayerRouting, slots_per_rank: Sequence[int]) -> tuple[Line, None]:
    return contiguous_line(routing.load(), slots_per_rank), None


def ours(routing: LayerRouting, slots_per_rank: Sequence[int]) -> tuple[Line, None]:
    return solve_layer(routing, slots_per_rank), None


def packed(routing: LayerRouting, slots_per_rank: Sequence[int]) -> tuple[Line, None]:
    return eplb(routing, slots_per_rank), None


def without_replicas(our_seconds: float) -> dict[str, Method]:
    """our_seconds: of the layer, what the others have at least."""
    from benchmarks.placement.partitions import metis_ids, metis_together

    def clustered(seconds: float) -> Method:
        return lambda routing, slots: k_means(routing, slots, 0, seconds)

    def drawn(seconds: float) -> Method:
        return lambda routing, slots: cross_entropy(routing, slots, 0, seconds)

    return {
        "load alone": lambda routing, slots: (load_alone(routing, slots), None),
        "METIS, token ids and experts": lambda routing, slots: (metis_ids(routing, slots, 0), None),
        "METIS, experts together": lambda routing, slots: (metis_together(routing, slots, 0), None),
        "balanced k-means": clustered(our_seconds),
        f"balanced k-means, {TIME_FACTOR}x the time": clustered(TIME_FACTOR * our_seconds),
        "cross-entropy": drawn(our_seconds),
        f"cross-entropy, {TIME_FACTOR}x the time": drawn(TIME_FACTOR * our_seconds),
    }


def compared(
    train: Sequence[LayerRouting], test: Sequence[LayerRouting], ranks: int
) -> dict[str, list[Judged]]:
    """By method, its layers; each experts once."""
    found: dict[str, list[Judged]] = {}
    for layer, (one, other) in enumerate(zip(train, test, strict=True)):
        slots = even(one.num_experts, ranks)
        found.setdefault("in order", []).append(judged(in_order, one, other, slots)[0])
        our_result = judged(ours, one, other, slots)[0]
        found.setdefault("ours", []).append(our_result)
        for name, method in without_replicas(our_result.seconds).items():
            found.setdefault(name, []).append(judged(method, one, other, slots)[0])
        print(f"{ranks} ranks, layer {layer}: copies {our_result.copies:.3f}", flush=True)
    return found


def mean(rows: Sequence[Judged]) -> Judged:
    return Judged(*(float(np.mean(column)) for column in zip(*rows, strict=True)))
