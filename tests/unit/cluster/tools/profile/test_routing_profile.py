"""`tandem profile --routing`: the file it writes, sums of counts, and its output."""

import json
from pathlib import Path

import numpy as np
import pytest

from cluster.cli.main import main
from models.prediction.profile_file import write_arrays
from models.prediction.routing_counts import RoutingCounts
from models.prediction.routing_profile import PREDICTOR_KINDS, RoutingProfile
from models.spec.model import read_spec

FOLDER = Path(__file__).resolve().parents[5] / "models" / "bundled"
SPEC = read_spec(FOLDER)
TEXTS = FOLDER.parents[1] / "docs" / "usage.md"


def profiled(output: Path, *arguments: str) -> int:
    return main(["profile", "--routing", "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [text for text in TEXTS.read_text().split("\n\n") if len(text) > 40]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def written(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("profile") / "routing.safetensors"
    assert profiled(output, "--input", str(texts), "--tokens", "2500", "--paths", "700") == 0
    return output


@pytest.mark.long
def test_profile_counts_four_fifths_of_the_texts(written: Path) -> None:
    counts = RoutingCounts.read(written, FOLDER, SPEC)
    assert 1800 < counts.counted < 2200
    assert len(counts.paths.ids_P2) == 700
    assert RoutingProfile.read(written, FOLDER, SPEC).means.keys() == counts.layers.keys()


@pytest.mark.long
def test_guesses_are_evaluated_on_held_out_texts(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "routing.safetensors"
    assert profiled(output, "--input", str(texts), "--tokens", "2500", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert 2000 < report["tokens"] <= 2500
    assert [each["layer"] for each in report["layers"]] == list(SPEC.moe_layers)[1:]
    for layer in report["layers"]:
        assert layer["hit_fraction"].keys() == set(PREDICTOR_KINDS)
        assert all(0.05 < hits <= 1.0 for hits in layer["hit_fraction"].values())


@pytest.mark.long
def test_counts_of_files_add_up(written: Path, tmp_path: Path) -> None:
    output = tmp_path / "sum.safetensors"
    assert profiled(output, "--add", str(written), "--add", str(written)) == 0
    one = RoutingCounts.read(written, FOLDER, SPEC)
    both = RoutingCounts.read(output, FOLDER, SPEC)
    assert both.counted == 2 * one.counted
    for layer, of in both.layers.items():
        assert np.array_equal(of.load_E, 2 * one.layers[layer].load_E)
        assert np.array_equal(of.pairs.times, 2 * one.layers[layer].pairs.times)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error line; a cleared progress bar precedes it."""
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message


def test_unusable_input_is_one_error_line(
    written: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "routing.safetensors"
    capsys.readouterr()
    assert profiled(output) == 2
    assert "--input FILES" in refused(capsys)
    assert profiled(output, "--input", str(texts), "--tokens", "300") == 2
    assert "at least 1000" in refused(capsys)
    assert profiled(output, "--input", str(texts), "--paths", "0") == 2
    assert "--paths 0: give a number from 1 to" in refused(capsys)
    arrays = RoutingCounts.read(written, FOLDER, SPEC).arrays()
    other = tmp_path / "other.safetensors"
    write_arrays(other, arrays | {"tokenizer": np.zeros(32, np.uint8)})
    assert profiled(output, "--add", str(other)) == 2
    assert "another tokenizer" in refused(capsys)
    assert profiled(output, "--add", str(tmp_path / "none.safetensors")) == 2
    assert "cannot be read" in refused(capsys)
    assert not output.exists()
