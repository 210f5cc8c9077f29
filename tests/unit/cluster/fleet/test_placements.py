"""A placement file at launch: which group it is for, and what it takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_placement_file, configured_placements, write_placement
from cluster.serving.server import preflight
from cluster.tools.bulk.workers import own_workers
from cluster.tools.doctor.config_checks import check_config
from cluster.tools.doctor.findings import Finding
from cluster.tools.doctor.weight_bytes import group_weight_bytes, prefill_weight_bytes
from contracts.config import BUNDLED, TandemConfig
from contracts.errors import ConfigError
from contracts.loading import load_config
from contracts.placement import PlacementFile
from contracts.ranks import Group
from models.prediction.profile_file import checkpoint_digest
from models.spec.model import read_spec
from models.text.tokenizer_files import tokenizer_digest
from planner.placement.slots import contiguous
from tests.support.placements import replicated

FOLDER = resolve_model_folder(BUNDLED)
SPEC = read_spec(FOLDER)
LAYERS = list(SPEC.moe_layers)
PLACED = msgspec.structs.replace(
    replicated(16, [2, 2], num_layers=SPEC.num_layers, moe_layers=LAYERS, seed=3), generation=7
)
EXPERT_BYTES = 3 * 192 * 96 * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = PlacementFile(
        checkpoint=checkpoint_digest(FOLDER).hex(),
        tokenizer=tokenizer_digest(FOLDER).hex(),
        placement=PLACED,
    )
    write_placement(file, tmp_path / "placement.json")
    return tmp_path / "placement.json"


def _config(path: Path, *settings: str) -> TandemConfig:
    return load_config(None, [f"placement.file={path}", "model.dtype=bfloat16", *settings])


def _finding(config: TandemConfig) -> Finding:
    return next(one for one in check_config(config, {}) if one.check == "placement")


def test_it_is_for_the_expert_ranks_and_begins_with_generation_0(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=2", "groups.prefill_ranks=2")
    placements = configured_placements(config, FOLDER, SPEC)
    assert placements[Group.EXPERT] == msgspec.structs.replace(PLACED, generation=0)
    assert placements[Group.PREFILL] == contiguous(16, 2, num_layers=5, moe_layers=LAYERS)
    assert placements[Group.EXPERT].digest == PLACED.digest


def test_without_expert_ranks_it_is_for_workers_of_all_to_all(path: Path) -> None:
    alone = ("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=2")
    config = _config(path, *alone, "prefill.experts=all_to_all")
    assert configured_placements(config, FOLDER, SPEC)[Group.PREFILL].digest == PLACED.digest
    plain = load_config(None, [*alone, "model.dtype=bfloat16", "prefill.experts=all_to_all"])
    more = prefill_weight_bytes(config, SPEC) - prefill_weight_bytes(plain, SPEC)
    assert more == 5 * 2 * EXPERT_BYTES
    with pytest.raises(ConfigError, match=r"prefill.experts=gathered.* set it to all_to_all"):
        configured_placements(_config(path, *alone, "prefill.experts=gathered"), FOLDER, SPEC)


def test_one_for_other_ranks_is_refused_before_anything_starts(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=4", "http.port=0")
    message = "on 2 ranks, the model has 16 in 5 and the group 4 ranks"
    with pytest.raises(ConfigError, match=message):
        preflight(config)
    with pytest.raises(ConfigError, match=message), own_workers(config, {}):
        pass
    assert _finding(config).level == "error"
    assert message in _finding(config).found


def test_more_slots_than_memory_are_refused_with_both_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(path, "groups.expert_ranks=2")
    needed = 5 * 20 * EXPERT_BYTES
    monkeypatch.setattr("cluster.fleet.placements.available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"its slots take 11 MiB on 2 ranks together, 11 MiB"):
        check_placement_file(config, FOLDER, SPEC)
    some = _config(path, "groups.expert_ranks=2", "experts.slots=16")
    assert check_placement_file(some, FOLDER, SPEC) is not None
    monkeypatch.setattr("cluster.fleet.placements.available_bytes", lambda: needed)
    assert check_placement_file(config, FOLDER, SPEC) is not None


def test_doctor_counts_replicas_and_slots_that_following_will_fill(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=2")
    assert group_weight_bytes(config, SPEC)[1] == 5 * 20 * EXPERT_BYTES
    assert _finding(config).found == f"{path}: 20 replicas, 2 MiB"
    settings = ["model.dtype=bfloat16", "groups.expert_ranks=2", "placement.spare_slots=1"]
    assert group_weight_bytes(load_config(None, settings), SPEC)[1] == 5 * 16 * EXPERT_BYTES
    settings.append("placement.rebalance=continuous")
    following = load_config(None, settings)
    assert group_weight_bytes(following, SPEC)[1] == 5 * 18 * EXPERT_BYTES
    assert "with 1 spare slots a rank" in _finding(following).found


def test_spare_slots_have_replicas_from_the_first_where_experts_follow() -> None:
    settings = ["groups.expert_ranks=4", "placement.spare_slots=2"]
    still = configured_placements(load_config(None, settings), FOLDER, SPEC)[Group.EXPERT]
    assert still == contiguous(16, 4, num_layers=5, moe_layers=LAYERS)
    settings.append("placement.rebalance=continuous")
    placement = configured_placements(load_config(None, settings), FOLDER, SPEC)[Group.EXPERT]
    assert placement.slots_per_rank == (6, 6, 6, 6)
    for rank in range(4):
        for line in placement.experts_of(rank).values():
            assert set(line) > set(range(4 * rank, 4 * rank + 4))
    replicas = [line.count(expert) for line in placement.expert_of_slot for expert in range(16)]
    assert max(replicas) <= 2


def test_more_spare_slots_than_a_rank_has_a_use_for_are_refused() -> None:
    settings = ["groups.expert_ranks=4", "placement.spare_slots=13", "placement.rebalance=once"]
    with pytest.raises(ConfigError, match="use for 12 more at most"):
        configured_placements(load_config(None, settings), FOLDER, SPEC)
