"""What a worker takes of the routing profile beside its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from actors.experts.caching import foresight
from contracts.config import TandemConfig
from contracts.errors import CheckpointError
from contracts.worker import Group, WorkerSpec
from models.decoder.decoder import AttentionHalf
from models.foresight.routing_counts import RoutingCounts
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"


def spec_of(folder: Path, **experts: str) -> WorkerSpec:
    config = msgspec.convert({"experts": experts}, TandemConfig)
    return WorkerSpec(
        group=Group.PREFILL,
        rank=0,
        attention_ranks=0,
        expert_ranks=0,
        model_folder=str(folder),
        token=b"",
        epoch=0,
        device="cpu",
        backend="tcp",
        config=config,
    )


def test_counts_alone_beside_a_checkpoint_foretell_nothing(tmp_path: Path) -> None:
    """A serving group may have written them there: hints are made without a profile then, unless
    somebody asks for one."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    spec = read_spec(folder)
    half = AttentionHalf.load(Checkpoint(folder), spec, dtype=torch.float32)
    RoutingCounts.read(folder / "routing.safetensors", folder, spec).write(
        folder / "routing.safetensors"
    )
    without = foresight(spec_of(folder), half)
    assert without is not None
    assert without.before.of[1] == [0.5, 0.5]
    with pytest.raises(CheckpointError, match="of counts alone, without what foretells"):
        foresight(spec_of(folder, hints="fitted"), half)
    with pytest.raises(CheckpointError, match="of counts alone, without what foretells"):
        foresight(spec_of(folder, profile=str(folder / "routing.safetensors")), half)
