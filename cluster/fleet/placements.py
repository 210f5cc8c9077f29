"""Expert placements of a configuration, and the memory they need."""

from pathlib import Path

import msgspec
import numpy as np

from actors.planning.planner_inputs import layer_routing
from actors.ranks.rendezvous import contiguous_placements
from contracts.config import TandemConfig
from contracts.errors import CheckpointError, ConfigError, writing
from contracts.json_input import read_json_file, struct_from
from contracts.machine import available_bytes
from contracts.placement import Placement, PlacementFile
from contracts.ranks import Group
from models.prediction.profile_file import checkpoint_digest
from models.prediction.routing_counts import RoutingCounts
from models.spec.checkpoint_files import ROUTING
from models.spec.model import ModelSpec
from models.text.tokenizer_files import tokenizer_digest
from models.weights import layout
from models.weights.checkpoint import element_bytes
from planner.placement.routing import LocalShares
from planner.placement.slots import ExpertPlacement, check_fits, contiguous_line

MIB = 1 << 20


def configured_placements(
    config: TandemConfig, folder: Path, spec: ModelSpec
) -> dict[Group, Placement]:
    """Return the placement of each group: that of `placement.file`, else contiguous.

    With rebalancing, spare slots hold replicas. Raises ConfigError: one line.
    """
    groups = config.groups
    placements = contiguous_placements(
        str(folder), expert_ranks=groups.expert_ranks, prefill_ranks=groups.prefill_ranks
    )
    if config.placement.file is not None:
        group, ranks = _of_file(config)
        placement = read_placement(Path(config.placement.file), folder, spec, ranks=ranks)
        placements[group] = msgspec.structs.replace(placement, generation=0)
    elif (
        config.placement.spare_slots and config.placement.rebalance != "off" and groups.expert_ranks
    ):
        placements[Group.EXPERT] = _with_spare(
            placements[Group.EXPERT], config.placement.spare_slots
        )
    return placements


def _with_spare(placement: Placement, spare: int) -> Placement:
    """Fill spare slots in turn with experts that a rank lacks. Raises ConfigError."""
    experts, most = placement.num_experts, max(placement.slots_per_rank)
    if most + spare > experts:
        raise ConfigError(
            f"placement.spare_slots={spare} beside {most} of {experts} experts on each of "
            f"{placement.ranks} expert ranks: a rank has a use for {experts - most} more at most"
        )
    slots = tuple(each + spare for each in placement.slots_per_rank)
    line = contiguous_line(np.ones(experts, np.int64), slots)
    lines = tuple(line if each else () for each in placement.expert_of_slot)
    return msgspec.structs.replace(placement, slots_per_rank=slots, expert_of_slot=lines)


def check_placement_file(config: TandemConfig, folder: Path, spec: ModelSpec) -> Placement | None:
    """Return the placement of `placement.file`, or None without one.

    Raises ConfigError if it belongs to another model or group, or if its slots exceed this
    machine's memory, which holds all ranks unless a cluster exists.
    """
    if config.placement.file is None:
        return None
    group, _ = _of_file(config)
    placement = configured_placements(config, folder, spec)[group]
    if config.groups.device == "cuda" or config.groups.address is not None:
        return placement
    needed, free = placed_bytes(config, spec, placement), available_bytes()
    if needed > free and not (config.experts.is_bounded and group is Group.EXPERT):
        raise ConfigError(
            f"placement.file={config.placement.file}: its slots take {needed / MIB:,.0f} MiB on "
            f"{placement.ranks} ranks together, {free / MIB:,.0f} MiB are free: give fewer spare "
            "slots (`tandem place --spare`), or set experts.slots"
        )
    return placement


def read_local_shares(config: TandemConfig, folder: Path, spec: ModelSpec) -> LocalShares | None:
    """Return the prediction for request routing, or None if it is off or there is no profile.

    Raises ConfigError for a profile of another model or tokenizer, or one without counts.
    """
    own = folder / ROUTING
    path = Path(config.experts.profile) if config.experts.profile else own
    is_divided = config.prefill.experts == "all_to_all" and config.groups.prefill_ranks > 1
    if not is_divided or config.prefill.locality_weight == 0 or not path.is_file():
        return None
    try:
        counts = RoutingCounts.read(path, folder, spec)
    except CheckpointError as error:
        raise ConfigError(f"{error.message}, or set prefill.locality_weight=0") from None
    placement = configured_placements(config, folder, spec)[Group.PREFILL]
    placed = ExpertPlacement(placement)
    layers = [
        (layer_routing(counts, layer).counts, placed.layer(layer).held(spec.num_experts))
        for layer in spec.moe_layers
    ]
    return LocalShares(layers, spec.top_k)


def placed_bytes(config: TandemConfig, spec: ModelSpec, placement: Placement) -> int:
    """Return the bytes of the experts of all ranks, replicas included."""
    expert_bytes = layout.expert_elements(spec) * element_bytes(spec, config.model.dtype)
    return sum(map(len, placement.expert_of_slot)) * expert_bytes


def _of_file(config: TandemConfig) -> tuple[Group, int]:
    """Return the group of `placement.file` and its number of ranks."""
    groups, kind = config.groups, config.prefill.experts
    if groups.expert_ranks:
        return Group.EXPERT, groups.expert_ranks
    if kind != "all_to_all":
        raise ConfigError(
            f"placement.file={config.placement.file} with groups.expert_ranks=0 and "
            f"prefill.experts={kind}, where no worker has experts for others: set it to "
            "all_to_all, or leave placement.file out"
        )
    return Group.PREFILL, groups.prefill_ranks


def read_placement(path: Path, folder: Path, spec: ModelSpec, *, ranks: int) -> Placement:
    """Read a placement for that number of ranks of the checkpoint. Raises ConfigError: one line."""
    file = struct_from(read_json_file(path), PlacementFile, str(path))
    mismatched = [
        name
        for name, written, digest in (
            ("checkpoint", file.checkpoint, checkpoint_digest(folder)),
            ("tokenizer", file.tokenizer, tokenizer_digest(folder)),
        )
        if written != digest.hex()
    ]
    if mismatched:
        raise ConfigError(
            f"{path}: a placement for another {mismatched[0]} than that of {folder}; make one with "
            "`tandem place`"
        )
    try:
        check_fits(file.placement, ranks, spec.num_experts, spec.moe_layers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    return file.placement


def check_writable(path: Path) -> None:
    """Raise ConfigError if a placement cannot be written to `path`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "a folder" if path.is_dir() else f"no folder {path.absolute().parent}"
        raise ConfigError(f"--output {path}: cannot be written: {reason}")


def write_placement(file: PlacementFile, path: Path) -> None:
    """Write a placement. Raises ConfigError if `path` cannot be written."""
    with writing("--output", path):
        path.write_bytes(msgspec.json.encode(file) + b"\n")
