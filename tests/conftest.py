"""Shared fixtures. Small on purpose: what one folder of tests needs belongs to that folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.tiny_models import make_tiny_checkpoint

torch.set_num_threads(1)  # two cores, several workers; and sums that do not depend on the machine

# A busy machine is no failure; and everybody's run tries what everybody else's does.
settings.register_profile("same everywhere", deadline=None, derandomize=True)
settings.load_profile("same everywhere")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run only where `-m` names them. What is beside what (`-n`): files, but one
    Ray cluster at a time, and those first, since they take longest."""
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: not _wants_ray(item))
    for item in items:
        group = "ray" if _wants_ray(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def _wants_ray(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("ray", "net"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_checkpoint(family, **overrides) -> folder, written once per set of arguments.

    Shared by the session: copy the folder before changing anything in it.
    """
    made: dict[str, Path] = {}

    def make(family: str = "qwen3_moe", **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            made[key] = make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make
