"""Methods side by side on the layers of traces: what each makes of texts held out.

Shapes: L layers, R ranks.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.placement.clusters import k_means
from benchmarks.placement.cross_entropy import cross_entropy
from benchmarks.placement.synthetic import routing_of
from benchmarks.placement.traces import Traces
from planner.placement.routing import LayerRouting, local_fraction, measure, token_ranks
from planner.placement.search import balanced
from planner.placement.slots import Line, contiguous_line, first_homes, held, layer_slots, line_of
from planner.placement.solve import solve_layer

TIME_FACTOR = 4  # times our time, beside our time, for methods that can use it
Method = Callable[[LayerRouting, Sequence[int]], Line]


class Judged(NamedTuple):
    """local: LAR by the token table made of the placement. seconds: of this process."""

    copies: float
    load: float
    local: float
    seconds: float


def layers_of(traces: Traces, num_experts: int) -> list[LayerRouting]:
    """A routing of each layer."""
    ids_P = traces.ids_P2[:, 0].astype(np.int64)
    paths_PLK = traces.paths_PLK.astype(np.int64)
    return [
        routing_of(num_experts, paths_PLK[:, layer], ids_P) for layer in range(paths_PLK.shape[1])
    ]


def even(num_experts: int, ranks: int) -> list[int]:
    """Slots per rank."""
    return [num_experts // ranks + (rank < num_experts % ranks) for rank in range(ranks)]


def judged(
    method: Method, train: LayerRouting, test: LayerRouting, slots_per_rank: Sequence[int]
) -> Judged:
    start = time.process_time()
    line = method(train, slots_per_rank)
    seconds = time.process_time() - start
    placed = layer_slots(line, slots_per_rank)
    found = measure(test, placed)
    table_V = token_ranks(train.counts, held(line, slots_per_rank, train.num_experts))
    ranks_V = np.zeros(max(int(test.ids_P.max()) + 1, len(table_V)), np.int64)  # other ids: rank 0
    ranks_V[: len(table_V)] = table_V
    return Judged(found.copies, found.load, local_fraction(test, placed, ranks_V), seconds)


def in_order(routing: LayerRouting, slots_per_rank: Sequence[int]) -> Line:
    return contiguous_line(routing.load(), slots_per_rank)


def load_alone(routing: LayerRouting, slots_per_rank: Sequence[int]) -> Line:
    """The hottest expert first, each to the least loaded rank that has room."""
    homes_R = first_homes(routing.num_experts, slots_per_rank)
    ranks_E = balanced(routing.load().astype(float), homes_R)
    return line_of(np.arange(len(ranks_E)), ranks_E, slots_per_rank, ())


def without_replicas(our_seconds: float) -> dict[str, Method]:
    """our_seconds: of the layer, what the others have at least."""
    from benchmarks.placement.partitions import metis_ids, metis_together

    def clustered(seconds: float) -> Method:
        return lambda routing, slots: k_means(routing, slots, 0, seconds)

    def drawn(seconds: float) -> Method:
        return lambda routing, slots: cross_entropy(routing, slots, 0, seconds)

    return {
        "load alone": load_alone,
        "METIS, token ids and experts": lambda routing, slots: metis_ids(routing, slots, 0),
        "METIS, experts together": lambda routing, slots: metis_together(routing, slots, 0),
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
        found.setdefault("in order", []).append(judged(in_order, one, other, slots))
        our_result = judged(solve_layer, one, other, slots)
        found.setdefault("ours", []).append(our_result)
        for name, method in without_replicas(our_result.seconds).items():
            found.setdefault(name, []).append(judged(method, one, other, slots))
        print(f"{ranks} ranks, layer {layer}: copies {our_result.copies:.3f}", flush=True)
    return found


def mean(rows: Sequence[Judged]) -> Judged:
    return Judged(*(float(np.mean(column)) for column in zip(*rows, strict=True)))
