"""Tensor names in a checkpoint folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from models.spec.config_fields import read_json
from models.spec.safetensors_file import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ROUTING = "routing.safetensors"  # a routing profile (models/prediction), no weights
HEAD = "lm_head.weight"


def stored_names(folder: Path) -> Collection[str]:
    """Return the names of the tensors; none without weights. Raises CheckpointError."""
    if (folder / SINGLE).is_file():
        return SafetensorsFile(folder / SINGLE).entries.keys()
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        return weight_map.keys() if isinstance(weight_map, dict) else ()
    return ()
