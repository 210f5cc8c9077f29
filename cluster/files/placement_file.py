"""Placements in files: what `tandem place` writes and a group is launched with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.files.json_input import read_json_file, struct_from
from contracts.errors import ConfigError
from contracts.placement import Placement, PlacementFile
from models.foresight.profile_file import digest_of
from models.spec.model import ModelSpec
from models.text.tokenizer_files import tokenizer_digest
from planner.placement.slots import check_fits


def read_placement(path: Path, folder: Path, spec: ModelSpec, *, ranks: int) -> Placement:
    """The placement in `path`, for that many ranks over the checkpoint in `folder`. Raises
    ConfigError: one line."""
    file = struct_from(read_json_file(path), PlacementFile, str(path))
    of_other = [
        name
        for name, written, digest in (
            ("checkpoint", file.checkpoint, digest_of(folder)),
            ("tokenizer", file.tokenizer, tokenizer_digest(folder)),
        )
        if written != digest.hex()
    ]
    if of_other:
        raise ConfigError(
            f"{path}: a placement for another {of_other[0]} than that of {folder}; make one with "
            "`tandem place`"
        )
    try:
        check_fits(file.placement, ranks, spec.num_experts, spec.moe_layers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    return file.placement


def check_writable(path: Path) -> None:
    """Raises ConfigError where a placement could not be written to `path`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "a folder" if path.is_dir() else f"no folder {path.absolute().parent}"
        raise ConfigError(f"--output {path}: cannot be written: {reason}")


def write_placement(file: PlacementFile, path: Path) -> None:
    """Raises ConfigError if `path` cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(file) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from None
