"""Model folders and placement files at launch."""

import json
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import msgspec
import pytest

from cluster.fleet.model_folder import public_name, resolve_model_folder
from cluster.fleet.placements import (
    check_placement_file,
    configured_placements,
    read_local_shares,
    read_placement,
    write_placement,
)
from cluster.serving.server import preflight
from cluster.tools.bulk.run import own_workers
from cluster.tools.doctor.config_checks import check_config
from cluster.tools.doctor.findings import Finding
from cluster.tools.doctor.rank_checks import group_weight_bytes, prefill_weight_bytes
from contracts.config import BUNDLED, TandemConfig
from contracts.errors import CheckpointError, ConfigError
from contracts.loading import load_config
from contracts.placement import PlacementFile
from contracts.ranks import Group
from models.prediction.profile_file import checkpoint_digest
from models.spec.model import read_spec
from models.text.tokenizer_files import tokenizer_digest
from planner.placement.slots import contiguous
from tests.support.one_line_errors import one_line_error
from tests.support.placements import replicated

FOLDER = resolve_model_folder(BUNDLED)
SPEC = read_spec(FOLDER)
LAYERS = list(SPEC.moe_layers)
PLACED = msgspec.structs.replace(
    replicated(16, [2, 2], num_layers=SPEC.num_layers, moe_layers=LAYERS, seed=3), generation=7
)
EVEN = contiguous(16, 4, num_layers=SPEC.num_layers, moe_layers=LAYERS)
EXPERT_BYTES = 3 * 192 * 96 * 2


# --- model.path


def test_folder_is_found_and_a_missing_one_is_one_line_without_a_hub_request(
    tmp_path: Path,
) -> None:
    assert (FOLDER / "config.json").is_file()
    assert resolve_model_folder(str(tmp_path)) == tmp_path.resolve()
    with one_line_error(CheckpointError, "no such folder; give a Hugging Face"):
        resolve_model_folder(str(tmp_path / "absent"))


def test_hub_id_is_downloaded_without_pickles_or_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, str | None]] = []
    folder = tmp_path / "models--organisation--model" / "snapshots" / "0123"

    def download(
        name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        wanted = ["config.json", "model-1.safetensors", "additional_chat_templates/tool_use.jinja"]
        other = ["original/model.safetensors", "consolidated.safetensors", "model.py", "a.bin"]
        ignored = [n for n in [*wanted, *other] if any(map(partial(fnmatch, n), ignore_patterns))]
        named = [n for n in [*wanted, *other] if any(map(partial(fnmatch, n), allow_patterns))]
        assert [name for name in named if name not in ignored] == wanted
        requests.append((name, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for path in ("organisation/model", "organisation/model@refs/pr/1"):
        assert resolve_model_folder(path) == folder
        assert public_name(path, folder) == "organisation/model"
    assert requests == [("organisation/model", None), ("organisation/model", "refs/pr/1")]
    folder.mkdir(parents=True)
    assert public_name(str(folder), folder) == "organisation/model"
    assert public_name(str(tmp_path), tmp_path) == tmp_path.name
    assert public_name("bundled", FOLDER) == "bundled"
    for target, name in ((tmp_path, "linked"), (folder, "organisation/model")):
        link = tmp_path / target.name / "linked"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        assert public_name(f"{link}/", resolve_model_folder(str(link))) == name


def test_unreachable_hub_is_one_line_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: object) -> str:
        raise httpx.ConnectError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with one_line_error(CheckpointError, "not to be had from the hub", "organisation/model"):
        resolve_model_folder("organisation/model")


# --- placement files


def write(placement: Any, folder: Path) -> Path:
    file = PlacementFile(
        checkpoint=checkpoint_digest(FOLDER).hex(),
        tokenizer=tokenizer_digest(FOLDER).hex(),
        placement=placement,
    )
    write_placement(file, folder / "placement.json")
    return folder / "placement.json"


@pytest.fixture
def even(tmp_path: Path) -> Path:
    return write(EVEN, tmp_path)


def _with(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["placement"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("tokenizer"), "tokenizer: missing"),
        (lambda tree: tree.update(checkpoint="0" * 64), "a placement for another checkpoint"),
        (lambda tree: tree.update(tokenizer="0" * 64), "a placement for another tokenizer"),
        (lambda tree: tree.update(tokenizer="x" * 64), "tokenizer: expected str matching regex"),
        (_with(num_experts=10**12), "16 slots for 10{12} experts: too few"),
        (_with(slots_per_rank=[4, 4, 4, 3]), "has 16 slots, slots_per_rank adds up to 15"),
        (_with(slots_per_rank=[4, 4, 8]), "on 3 ranks, the model has 16 in 5 and the group 4"),
        (_with(expert_of_slot=[]), "16 experts in 0 layers on 4 ranks"),
        (_with(expert_of_slot=[[0] * 16] * 5), "expert 1 is not placed"),
    ],
)
def test_invalid_file_is_refused_in_one_line(
    change: Callable[[dict[str, Any]], object], message: str, even: Path
) -> None:
    tree = json.loads(even.read_text())
    change(tree)
    even.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(even))}: .*{message}") as raised:
        read_placement(even, FOLDER, SPEC, ranks=4)
    assert "\n" not in raised.value.message


def test_unreadable_file_is_refused_and_a_valid_one_is_read_as_written(even: Path) -> None:
    assert read_placement(even, FOLDER, SPEC, ranks=4) == EVEN
    even.write_bytes(even.read_bytes()[:100])
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_placement(even, FOLDER, SPEC, ranks=4)
    even.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_placement(even, FOLDER, SPEC, ranks=4)
    with pytest.raises(ConfigError, match=r"--output .*: cannot be written"):
        write(EVEN, even / "no folder")


def test_tokenizer_digest_depends_on_token_ids(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert tokenizer_digest(tmp_path) == tokenizer_digest(FOLDER)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert tokenizer_digest(tmp_path) != tokenizer_digest(FOLDER)


# --- placements of a launch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(PLACED, tmp_path)


def _config(path: Path, *settings: str) -> TandemConfig:
    return load_config(None, [f"placement.file={path}", "model.dtype=bfloat16", *settings])


def _finding(config: TandemConfig) -> Finding:
    return next(one for one in check_config(config, {}) if one.check == "placement")


def _divided(*settings: str) -> TandemConfig:
    groups = [f"groups.{key}" for key in ("prefill_ranks=2", "attention_ranks=0", "expert_ranks=0")]
    return load_config(None, ["prefill.experts=all_to_all", *groups, *settings])


def test_local_shares_follow_the_placement_of_the_workers(tmp_path: Path) -> None:
    shares = read_local_shares(_divided(), FOLDER, SPEC)
    turned = [(*range(8, 16), *range(8)) for _ in LAYERS]
    path = write(
        msgspec.structs.replace(EVEN, slots_per_rank=(8, 8), expert_of_slot=turned), tmp_path
    )
    other = read_local_shares(_divided(f"placement.file={path}"), FOLDER, SPEC)
    assert shares is not None
    assert other is not None
    for ids in ([300, 301], list(range(256, 4000)), [10**6]):
        one, two = shares.of_tokens(ids)
        assert one + two == pytest.approx(1, abs=1e-5)
        assert other.of_tokens(ids) == pytest.approx([two, one], abs=1e-5)
    for off in ("prefill.locality_weight=0", "groups.prefill_ranks=1", "prefill.experts=gathered"):
        assert read_local_shares(_divided(off), FOLDER, SPEC) is None


def test_profile_of_another_model_is_refused_with_both_remedies(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))
    with one_line_error(ConfigError, "another checkpoint", "prefill.locality_weight=0"):
        preflight(_divided(f"model.path={tmp_path / 'model'}"))
    (tmp_path / "model" / "routing.safetensors").unlink()
    assert read_local_shares(_divided(), tmp_path / "model", SPEC) is None


def test_file_is_for_the_expert_ranks_and_begins_with_generation_0(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=2", "groups.prefill_ranks=2")
    placements = configured_placements(config, FOLDER, SPEC)
    assert placements[Group.EXPERT] == msgspec.structs.replace(PLACED, generation=0)
    assert placements[Group.PREFILL] == contiguous(16, 2, num_layers=5, moe_layers=LAYERS)
    assert placements[Group.EXPERT].digest == PLACED.digest


def test_file_is_for_all_to_all_workers_without_expert_ranks(path: Path) -> None:
    alone = ("groups.attention_ranks=0", "groups.expert_ranks=0", "groups.prefill_ranks=2")
    config = _config(path, *alone, "prefill.experts=all_to_all")
    assert configured_placements(config, FOLDER, SPEC)[Group.PREFILL].digest == PLACED.digest
    plain = load_config(None, [*alone, "model.dtype=bfloat16", "prefill.experts=all_to_all"])
    more = prefill_weight_bytes(config, SPEC) - prefill_weight_bytes(plain, SPEC)
    assert more == 5 * 2 * EXPERT_BYTES
    with pytest.raises(ConfigError, match=r"prefill.experts=gathered.* set it to all_to_all"):
        configured_placements(_config(path, *alone, "prefill.experts=gathered"), FOLDER, SPEC)


def test_file_for_other_ranks_is_refused_before_anything_starts(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=4", "http.port=0")
    message = "on 2 ranks, the model has 16 in 5 and the group 4 ranks"
    with pytest.raises(ConfigError, match=message):
        preflight(config)
    with pytest.raises(ConfigError, match=message), own_workers(config, {}):
        pass
    assert _finding(config).level == "error"
    assert message in _finding(config).found


def test_slots_beyond_memory_are_refused_with_both_numbers(
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


def test_doctor_counts_replicas_and_spare_slots(path: Path) -> None:
    config = _config(path, "groups.expert_ranks=2")
    assert group_weight_bytes(config, SPEC)[1] == 5 * 20 * EXPERT_BYTES
    assert _finding(config).found == f"{path}: 20 replicas, 2 MiB"
    settings = ["model.dtype=bfloat16", "groups.expert_ranks=2", "placement.spare_slots=1"]
    assert group_weight_bytes(load_config(None, settings), SPEC)[1] == 5 * 16 * EXPERT_BYTES
    rebalanced = load_config(None, [*settings, "placement.rebalance=continuous"])
    assert group_weight_bytes(rebalanced, SPEC)[1] == 5 * 18 * EXPERT_BYTES
    assert "with 1 spare slots a rank" in _finding(rebalanced).found


def test_spare_slots_hold_replicas_from_the_start_if_experts_are_rebalanced() -> None:
    settings = ["groups.expert_ranks=4", "placement.spare_slots=2"]
    still = configured_placements(load_config(None, settings), FOLDER, SPEC)[Group.EXPERT]
    assert still == EVEN
    settings.append("placement.rebalance=continuous")
    placement = configured_placements(load_config(None, settings), FOLDER, SPEC)[Group.EXPERT]
    assert placement.slots_per_rank == (6, 6, 6, 6)
    for rank in range(4):
        for line in placement.experts_of(rank).values():
            assert set(line) > set(range(4 * rank, 4 * rank + 4))
    replicas = [line.count(expert) for line in placement.expert_of_slot for expert in range(16)]
    assert max(replicas) <= 2


def test_more_spare_slots_than_other_experts_are_refused() -> None:
    settings = ["groups.expert_ranks=4", "placement.spare_slots=13", "placement.rebalance=once"]
    with pytest.raises(ConfigError, match="use for 12 more at most"):
        configured_placements(load_config(None, settings), FOLDER, SPEC)
