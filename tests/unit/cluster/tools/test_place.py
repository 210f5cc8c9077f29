"""`tandem place` on the bundled model's profile, and on invalid profiles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cluster.cli.main import main
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import read_placement
from cluster.tools.place import slots_of
from contracts.config import BUNDLED
from contracts.errors import ConfigError
from models.spec.model import read_spec
from tests.support.one_line_errors import error_line

FOLDER = resolve_model_folder(BUNDLED)
PROFILE = FOLDER / "routing.safetensors"
Capture = pytest.CaptureFixture[str]


@pytest.mark.long
def test_written_placement_passes_launch_checks(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "placement.json"
    arguments = ["place", str(PROFILE), "--ranks", "2", "--spare", "1", "--output", str(path)]
    assert main([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    spec = read_spec(FOLDER)
    placement = read_placement(path, FOLDER, spec, ranks=2)
    assert placement.slots_per_rank == tuple(output["slots_per_rank"]) == (9, 9)
    assert placement.digest == output["digest"]
    assert [row["layer"] for row in output["layers"]] == list(spec.moe_layers)
    assert output["placed"]["copies"] < output["in_order"]["copies"]
    before = path.read_bytes()
    assert main(arguments) == 0
    assert path.read_bytes() == before
    assert "mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("experts", "ranks", "spare", "slots"),
    [(16, 4, 0, (4, 4, 4, 4)), (7, 3, 1, (4, 3, 3)), (4, 4, 3, (4, 4, 4, 4))],
)
def test_spare_slots_are_added_to_every_rank(
    experts: int, ranks: int, spare: int, slots: tuple[int, ...]
) -> None:
    assert slots_of(experts, ranks, spare) == slots


@pytest.mark.parametrize(
    ("ranks", "spare", "message"),
    [
        (0, 0, "--ranks 0: the model has 16 experts; give 1 to 16 ranks"),
        (17, 0, "--ranks 17: the model has 16 experts"),
        (-1, 0, "--ranks -1"),
        (4, -1, "--spare -1"),
        (4, 13, "--spare 13: a rank of 4 has 4 of the 16 experts, and a use for 12 more at most"),
    ],
)
def test_ranks_and_slots_that_do_not_fit_are_refused(ranks: int, spare: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slots_of(16, ranks, spare)


def _error(capsys: Capture, *arguments: str) -> str:
    return error_line(capsys, "place", *arguments)


def test_unreadable_input_or_output_is_reported_before_placement(
    tmp_path: Path, capsys: Capture
) -> None:
    ranks = ("--ranks", "2")
    assert "cannot be read" in _error(capsys, str(tmp_path / "none"), *ranks)
    assert "no folder" in _error(capsys, str(PROFILE), *ranks, "--output", str(tmp_path / "a/b"))
    assert "a folder" in _error(capsys, str(PROFILE), *ranks, "--output", str(tmp_path))
    assert "--seed -1" in _error(capsys, str(PROFILE), *ranks, "--seed", "-1")
    message = "--nodes 3: --ranks 2 is no multiple; give a divisor of it"
    assert message in _error(capsys, str(PROFILE), *ranks, "--nodes", "3")
    (tmp_path / "short").write_bytes(PROFILE.read_bytes()[:50_000])
    _error(capsys, str(tmp_path / "short"), *ranks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(counted=np.array([300])), "300 tokens; at least"),
        (lambda tensors: tensors.update(tokenizer=tensors["tokenizer"] ^ 1), "tokenizer"),
        (lambda tensors: tensors.pop("counted"), "without counts"),
        (lambda tensors: tensors.update(paths=np.full_like(tensors["paths"], 99)), "paths"),
    ],
)
def test_short_or_foreign_profile_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path, capsys: Capture
) -> None:
    tensors = load_file(PROFILE)
    change(tensors)
    save_file(tensors, tmp_path / "routing.safetensors")
    assert message in _error(capsys, str(tmp_path / "routing.safetensors"), "--ranks", "2")
