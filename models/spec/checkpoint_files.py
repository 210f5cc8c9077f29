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
_TEXT = {"model.language_model.": "model.", "language_model.": ""}  # beside a vision model


def stored_names(folder: Path) -> Collection[str]:
    """Return the plain names of the tensors; none without weights. Raises CheckpointError."""
    names: Collection[str] = ()
    if (folder / SINGLE).is_file():
        names = SafetensorsFile(folder / SINGLE).entries.keys()
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = weight_map.keys() if isinstance(weight_map, dict) else ()
    return {plain_name(name) for name in names}


def plain_name(name: str) -> str:
    """Return the name that a tensor of a text model has without a vision model beside it."""
    for prefix, plain in _TEXT.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
