"""`tandem place`: a placement of every layer's experts on ranks, from a routing profile."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from actors.planning.planner_inputs import layer_routing
from cluster.observe.terminal import Terminal
from contracts.errors import ConfigError
from contracts.placement import Placement, PlacementFile
from models.prediction.routing_counts import RoutingCounts
from models.weights.checkpoint import check_checkpoint
from planner.placement.nodes import (
    LinkLevels,
    aligned_on_nodes,
    even_nodes,
    sent_ranks,
    solve_on_nodes,
)
from planner.placement.routing import LayerRouting, local_fraction, measure, token_ranks
from planner.placement.slots import Line, contiguous, contiguous_line, held, layer_slots
from planner.placement.solve import split

MIN_GAIN = 0.005  # relative; smaller gains count as none


class PlacementQuality(msgspec.Struct, frozen=True):
    """Quality of one layer's placement on the held-out part of the sample.

    outer: copies of a token on other nodes than the one that has most.
    """

    copies: float
    local_fraction: float
    load: float
    outer: float


class LayerReport(msgspec.Struct, frozen=True):
    """in_order: experts in order, each once. placed: the solver's placement."""

    layer: int
    in_order: PlacementQuality
    placed: PlacementQuality
    is_improvement: bool


class PlaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `tandem place --json`.

    tokens: evaluated per layer. digest, slots_per_rank: of the placement. in_order, placed: means
    over layers.
    """

    tokens: int
    digest: str
    slots_per_rank: tuple[int, ...]
    in_order: PlacementQuality
    placed: PlacementQuality
    layers: list[LayerReport]


def place(
    profile: Path,
    folder: Path,
    *,
    ranks: int,
    spare: int,
    nodes: int,
    seed: int,
    progress: Callable[[float], None],
) -> tuple[PlacementFile, PlaceReport]:
    """Place the experts of all layers.

    spare: slots of each rank beyond its share of the experts. nodes: of consecutive ranks.
    progress: called with the completed fraction. Raises CheckpointError, ConfigError.
    """
    spec = check_checkpoint(folder)
    slots = slots_of(spec.num_experts, ranks, spare)
    levels = nodes_of(ranks, nodes)
    counts = RoutingCounts.read(profile, folder, spec)
    plain = slots_of(spec.num_experts, ranks, 0)
    routings = [layer_routing(counts, layer) for layer in spec.moe_layers]
    solved = list[Line]()
    for routing in routings:
        solved.append(solve_on_nodes(routing, slots, levels, seed=seed))
        progress(len(solved) / len(routings))
    lines: list[Line] = [()] * spec.num_layers
    rows, tokens = list[LayerReport](), 0
    placed = aligned_on_nodes(
        solved, [each.counts for each in routings], slots, spec.num_experts, levels
    )
    for layer, routing, line in zip(spec.moe_layers, routings, placed, strict=True):
        lines[layer], kept = line, split(routing)[1]
        tokens = len(kept.sets_PK)
        before = _quality(kept, contiguous_line(routing.load(), plain), plain, levels)
        after = _quality(kept, line, slots, levels)
        rows.append(LayerReport(layer, before, after, _is_improvement(before, after)))
    placement = Placement(
        num_experts=spec.num_experts, slots_per_rank=slots, expert_of_slot=tuple(lines)
    )
    file = PlacementFile(
        checkpoint=counts.checkpoint.hex(), tokenizer=counts.tokenizer.hex(), placement=placement
    )
    report = PlaceReport(
        tokens=tokens,
        digest=placement.digest,
        slots_per_rank=slots,
        in_order=_mean([row.in_order for row in rows]),
        placed=_mean([row.placed for row in rows]),
        layers=rows,
    )
    return file, report


def slots_of(num_experts: int, ranks: int, spare: int) -> tuple[int, ...]:
    """Return the slots of each rank. Raises ConfigError."""
    if not 1 <= ranks <= num_experts:
        raise ConfigError(
            f"--ranks {ranks}: the model has {num_experts} experts; give 1 to {num_experts} ranks"
        )
    base = contiguous(num_experts, ranks, num_layers=1, moe_layers=[0]).slots_per_rank
    most = num_experts - base[0]
    if not 0 <= spare <= most:
        raise ConfigError(
            f"--spare {spare}: a rank of {ranks} has {base[0]} of the {num_experts} experts, and a "
            f"use for {most} more at most; give 0 to {most}"
        )
    return tuple(slots + spare for slots in base)


def nodes_of(ranks: int, nodes: int) -> LinkLevels:
    """Return the nodes of the ranks. Raises ConfigError."""
    if nodes < 1 or ranks % nodes:
        raise ConfigError(f"--nodes {nodes}: --ranks {ranks} is no multiple; give a divisor of it")
    return even_nodes(ranks, nodes)


def _quality(
    kept: LayerRouting, line: Line, slots: Sequence[int], levels: LinkLevels
) -> PlacementQuality:
    placed = layer_slots(line, slots)
    label_V = token_ranks(kept.counts, held(line, slots, kept.num_experts))
    found = measure(kept, placed)
    known = kept._replace(ids_P=kept.ids_P[kept.ids_P < len(label_V)])
    known = known._replace(sets_PK=kept.sets_PK[kept.ids_P < len(label_V)])
    local = local_fraction(known, placed, label_V)
    outer = levels.copies(sent_ranks(kept, line, slots)).outer if len(kept.sets_PK) else 0.0
    return PlacementQuality(found.copies, local, found.load, outer)


def _is_improvement(before: PlacementQuality, after: PlacementQuality) -> bool:
    both = [(getattr(before, kind), getattr(after, kind)) for kind in ("copies", "load", "outer")]
    return any(placed < in_order * (1 - MIN_GAIN) for in_order, placed in both)


def _mean(rows: Sequence[PlacementQuality]) -> PlacementQuality:
    columns = zip(*map(msgspec.structs.astuple, rows), strict=True)
    return PlacementQuality(*(sum(column) / len(rows) for column in columns))


def print_placement(report: PlaceReport) -> None:
    """Print a row for each layer, and the mean."""
    table = Table(
        title=f"experts in order -> placed, on {report.tokens} tokens held out",
        caption=f"slots of the ranks: {', '.join(map(str, report.slots_per_rank))}",
        box=None,
    )
    names = ["copies of a token", "local by token id", "load of the busiest"]
    if any(row.in_order.outer for row in report.layers):
        names.append("copies on other nodes")
    for name in ("layer", *names, ""):
        table.add_column(name, justify="right" if name else "left")
    for row in report.layers:
        table.add_row(
            str(row.layer),
            *_shown(row.in_order, row.placed)[: len(names)],
            "" if row.is_improvement else "no gain",
        )
    table.add_row("mean", *_shown(report.in_order, report.placed)[: len(names)], style="bold")
    Terminal().print(table)
    if not any(row.is_improvement for row in report.layers):
        Terminal().print("no gain: experts in order are as good")


def _shown(before: PlacementQuality, after: PlacementQuality) -> list[str]:
    pairs = zip(*map(msgspec.structs.astuple, (before, after)), strict=True)
    return [f"{one:.3f} -> {other:.3f}" for one, other in pairs]
