"""Predictors from the routing profile beside a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from actors.offload.cache_factory import predictor
from contracts.config import TandemConfig
from contracts.errors import CheckpointError
from contracts.ranks import Group, RankSpec
from models.decoder.decoder import AttentionHalf
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"


def spec_of(folder: Path, **experts: str) -> RankSpec:
    config = msgspec.convert({"experts": experts}, TandemConfig)
    return RankSpec(
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


def test_profile_of_counts_alone_gives_no_predictor(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    spec = read_spec(folder)
    half = AttentionHalf.load(Checkpoint(folder), spec, dtype=torch.float32)
    RoutingCounts.read(folder / "routing.safetensors", folder, spec).write(
        folder / "routing.safetensors"
    )
    without = predictor(spec_of(folder), half)
    assert without is not None
    assert without.before.by_layer[1] == [0.5, 0.5]
    with pytest.raises(CheckpointError, match="with counts but without predictors"):
        predictor(spec_of(folder, predictor="fitted"), half)
    with pytest.raises(CheckpointError, match="with counts but without predictors"):
        predictor(spec_of(folder, profile=str(folder / "routing.safetensors")), half)
