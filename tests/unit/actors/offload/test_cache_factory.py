"""Expert caches and predictors from the configuration."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.offload import cache_factory
from actors.offload.cache_factory import device_cache, predictor
from actors.telemetry.telemetry import Telemetry
from contracts.config import TandemConfig
from contracts.errors import CheckpointError, ConfigError, ResourceError, TandemError
from contracts.ranks import Group, RankSpec
from models.decoder.decoder import AttentionHalf
from models.experts.expert_layout import ExpertLayout
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.rank_specs import rank_spec

FOLDER = Path(__file__).resolve().parents[4] / "models" / "bundled"


def spec_of(folder: Path, device: str = "cpu", **sections: dict[str, Any]) -> RankSpec:
    config = msgspec.convert(sections, TandemConfig)
    return rank_spec(Group.PREFILL, folder, device=device, config=config)


def device_spec(store: Path, **experts: Any) -> RankSpec:
    return spec_of(FOLDER, "cuda:0", experts=experts, prefill={"host_store": str(store)})


@pytest.fixture
def layout() -> ExpertLayout:
    """Return a GPU's layout on the CPU."""
    return ExpertLayout(read_spec(FOLDER), torch.float32, torch.device("cpu"), packed=False)


@pytest.mark.parametrize(
    ("experts", "free", "error", "expected_error"),
    [
        (
            {"slots": 1},
            1 << 40,
            ConfigError,
            "experts.slots=1: room for 1 experts, but a token is computed with 2 of a layer: "
            "give at least experts.slots=2, or experts.bytes=442368",
        ),
        (
            {"bytes": 400_000},
            1 << 40,
            ConfigError,
            "experts.bytes=400000: room for 1 experts, but a token is computed with 2 of a layer: ",
        ),
        (
            {"slots": 40},
            10 * 221184 + 5,
            ResourceError,
            "experts.slots=40: 40 experts of 221184 bytes are 8847360, and 2211845 bytes are free "
            "on cuda:0: give less than experts.slots=10,",
        ),
        (
            {"bytes": 9_000_000},
            10 * 221184,
            ResourceError,
            "experts.bytes=9000000: 40 experts of 221184 bytes are 8847360, and 2211840 bytes are "
            "free on cuda:0: give less than experts.bytes=2211840,",
        ),
    ],
)
def test_unusable_settings_are_rejected_with_numbers(
    layout: ExpertLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experts: dict[str, Any],
    free: int,
    error: type[TandemError],
    expected_error: str,
) -> None:
    monkeypatch.setattr(cache_factory, "free_bytes", lambda device: free)
    with pytest.raises(error) as raised:
        device_cache(device_spec(tmp_path, **experts), layout, Telemetry())
    assert raised.value.message.startswith(expected_error)
    assert not list(tmp_path.iterdir()), "nothing was made"


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
    assert without.precision[1] == [0.5, 0.5]
    with pytest.raises(CheckpointError, match="with counts but without predictors"):
        predictor(spec_of(folder, experts={"predictor": "fitted"}), half)
    with pytest.raises(CheckpointError, match="with counts but without predictors"):
        predictor(spec_of(folder, experts={"profile": str(folder / "routing.safetensors")}), half)
