"""Configurations of well-known models, shipped so that plans need no download.

Figures of the published config.json files, without fields that `ModelSpec` does not read. The
factors of longrope, on which no plan depends, are 1.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

_FILE = Path(__file__).with_name("known_models.json")


def find_known_model(name: str) -> dict[str, Any] | None:
    """Return the config.json fields of a hub id or its last part, in any case, or None."""
    wanted = name.lower()
    for hub_id, config in _configs().items():
        if wanted in (hub_id.lower(), _short(hub_id)):
            return config
    return None


def known_model_names() -> list[str]:
    """Short names, as `find_known_model` accepts them."""
    return [hub_id.partition("/")[2].removesuffix("-v0.1") for hub_id in _configs()]


def _short(hub_id: str) -> str:
    return hub_id.partition("/")[2].lower().removesuffix("-v0.1")


@functools.cache
def _configs() -> dict[str, dict[str, Any]]:
    return msgspec.json.decode(_FILE.read_bytes(), type=dict[str, dict[str, Any]])
