"""Settings of colocated generation, and its predicted gain."""

import msgspec
import pytest

from cluster.fleet import colocation
from cluster.fleet.colocation import colocate, colocated_gain, weight_bytes
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED, TandemConfig
from contracts.loading import load_config
from models.spec.model import read_spec
from planner.costs.stages import Linear, StageModels

SPEC = read_spec(resolve_model_folder(BUNDLED))


def configured(*settings: str) -> TandemConfig:
    return load_config(None, ["groups.colocated=auto", *settings])


def test_workers_take_the_place_and_the_threads_of_both_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(colocation, "whole_cores", lambda: 8)
    found = colocate(configured("groups.attention_ranks=2", "groups.expert_ranks=4"), SPEC).groups
    assert (found.attention_ranks, found.expert_ranks, found.prefill_ranks) == (0, 0, 2)
    assert found.torch_threads == 3
    monkeypatch.setattr(colocation, "whole_cores", lambda: 1)
    assert colocate(configured("groups.torch_threads=2"), SPEC).groups.torch_threads == 2


@pytest.mark.parametrize(
    "settings",
    [
        ["groups.colocated=never"],
        ["groups.device=cuda"],
        ["groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=1"],
        ["groups.prefill_ranks=2", "prefill.experts=gathered"],
        ["prefill.disable_kv_cache=true"],
        ["experts.slots=4"],
        ['groups.expert_resources={"big": 1}'],
    ],
)
def test_settings_that_need_both_groups_keep_them(settings: list[str]) -> None:
    config = configured(*settings)
    assert colocate(config, SPEC) is config


def test_weights_must_fit_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("groups.attention_ranks=2")
    needed = 2 * weight_bytes(config, SPEC)
    for free, fits in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(colocation, "available_bytes", lambda free=free: free)
        assert (colocate(config, SPEC) is not config) == fits


def test_gain_is_the_share_of_links_and_needs_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Linear(0.5, 0.0)
    stages = StageModels(attention=half, expert=half, a2e=half, e2a=Linear(1.0, 0.0))
    assert stages.colocated_gain(1, 0.5) == 2.5
    assert msgspec.structs.replace(stages, shared=half).colocated_gain(1, 0.5) == 2.0
    config = configured()
    assert colocated_gain(config, SPEC) is None
    profiled = configured("planner.hardware=h200-node")
    gain = colocated_gain(profiled, SPEC)
    assert gain is not None
    assert 1 < gain < 10
    monkeypatch.setattr(colocation, "colocated_gain", lambda *_: 0.9)
    assert colocate(profiled, SPEC) is profiled
