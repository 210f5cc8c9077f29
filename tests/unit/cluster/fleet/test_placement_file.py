"""Files of placements: what is written is read again, and every other file is refused in a line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import read_placement, write_placement
from contracts.config import BUNDLED
from contracts.errors import ConfigError
from contracts.placement import PlacementFile
from models.prediction.profile_file import checkpoint_digest
from models.spec.model import read_spec
from models.text.tokenizer_files import tokenizer_digest
from planner.placement.slots import contiguous

FOLDER = resolve_model_folder(BUNDLED)
SPEC = read_spec(FOLDER)
PLACED = contiguous(
    SPEC.num_experts, 4, num_layers=SPEC.num_layers, moe_layers=list(SPEC.moe_layers)
)
FILE = PlacementFile(
    checkpoint=checkpoint_digest(FOLDER).hex(),
    tokenizer=tokenizer_digest(FOLDER).hex(),
    placement=PLACED,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_placement(FILE, tmp_path / "placement.json")
    return tmp_path / "placement.json"


def test_a_placement_is_read_as_it_was_written(path: Path) -> None:
    assert read_placement(path, FOLDER, SPEC, ranks=4) == PLACED


def _with(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["placement"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("tokenizer"), "tokenizer: missing"),
        (lambda tree: tree.update(more=1), "unknown field more"),
        (lambda tree: tree.update(checkpoint="0" * 64), "a placement for another checkpoint"),
        (lambda tree: tree.update(tokenizer="0" * 64), "a placement for another tokenizer"),
        (lambda tree: tree.update(tokenizer="x" * 64), "tokenizer: expected str matching regex"),
        (_with(num_experts="16"), "placement.num_experts: expected int, got str"),
        (_with(num_experts=10**12), "16 slots for 10{12} experts: too few"),
        (_with(slots_per_rank=[4, 4, 4, 3]), "has 16 slots, slots_per_rank adds up to 15"),
        (_with(slots_per_rank=[4, 4, 8]), "on 3 ranks, the model has 16 in 5 and the group 4"),
        (_with(expert_of_slot=[]), "16 experts in 0 layers on 4 ranks"),
        (_with(expert_of_slot=[[0] * 16] * 5), "expert 1 is not placed"),
        (_with(expert_of_slot=[[*range(15), 16]] * 5), "expert 15 is not placed"),
    ],
)
def test_every_other_file_is_refused_in_a_line(
    change: Callable[[dict[str, Any]], object], message: str, path: Path
) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*{message}") as raised:
        read_placement(path, FOLDER, SPEC, ranks=4)
    assert "\n" not in raised.value.message


def test_what_is_cut_off_or_for_other_ranks_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="on 4 ranks, the model has 16 in 5 and the group 2"):
        read_placement(path, FOLDER, SPEC, ranks=2)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_placement(path, FOLDER, SPEC, ranks=4)
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_placement(path, FOLDER, SPEC, ranks=4)


def test_folders_with_other_token_ids_have_other_fingerprints(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert tokenizer_digest(tmp_path) == tokenizer_digest(FOLDER)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert tokenizer_digest(tmp_path) != tokenizer_digest(FOLDER)


def test_unwritable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*: cannot be written"):
        write_placement(FILE, tmp_path / "no folder" / "placement.json")
