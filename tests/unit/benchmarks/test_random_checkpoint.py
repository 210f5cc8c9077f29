"""The checkpoints that benchmarks run on can be loaded, of every family that has its experts so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.support.random_checkpoint import write_random_checkpoint
from models.spec.families import FAMILIES
from models.weights.checkpoint import check_checkpoint
from tests.support.local_model import LocalModel


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_checkpoint_is_whole(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    config = json.loads((tiny_checkpoint(family) / "config.json").read_text())
    folder = write_random_checkpoint(tmp_path / "model", {**config, "torch_dtype": "float32"})
    check_checkpoint(folder)
    assert LocalModel.load(folder).greedy([3, 4, 5], 4)
