"""`tandem profile --routing`: what it writes, adds up and shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.cli.main import main
from cluster.tools.profile.routing_quality import ranks_of_ids
from models.prediction.count_predictor import NearestTokens
from models.prediction.profile_file import write_arrays
from models.prediction.routing_counts import RoutingCounts
from models.prediction.routing_profile import RoutingProfile
from models.spec.model import read_spec
from planner.placement.slots import LayerSlots

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


def test_a_profile_has_both_parts_of_all_but_a_fifth(written: Path) -> None:
    counts = RoutingCounts.read(written, FOLDER, SPEC)
    assert 1800 < counts.counted < 2200
    assert len(counts.paths.ids_P2) == 700
    assert RoutingProfile.read(written, FOLDER, SPEC).means.keys() == counts.layers.keys()


def test_held_out_texts_are_judged(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "routing.safetensors"
    assert profiled(output, "--input", str(texts), "--tokens", "2500", "--json") == 0
    judged = json.loads(capsys.readouterr().out)
    assert 0.1 < judged["held_out"] / (judged["counted"] + judged["held_out"]) < 0.3
    assert [of["layer"] for of in judged["layers"]] == list(SPEC.moe_layers)
    for of in judged["layers"]:
        bits, found = of["entropy_bits"], of["hit_fraction"]
        assert 1.0 <= bits["token"] < bits["usual"] <= 4.5
        assert found["token"] > found["usual"] > 0.05
        assert ("previous" in found) == ("after" in found) == (of["layer"] > 0)
    assert [of["ranks"] for of in judged["ranks"]] == [2, 4, 8]
    copies = [of["copies"] for of in judged["ranks"]]
    assert 1.0 < copies[0] < copies[1] < copies[2] < 2.0
    local = [of["local_fraction"] for of in judged["ranks"]]
    assert 0.9 > local[0] > local[1] > local[2] > 0.2
    assert all(1.0 <= of["load"] <= of["worst_load"] for of in judged["ranks"])


def test_what_was_counted_adds_up(written: Path, tmp_path: Path) -> None:
    output = tmp_path / "sum.safetensors"
    assert profiled(output, "--add", str(written), "--add", str(written)) == 0
    one = RoutingCounts.read(written, FOLDER, SPEC)
    both = RoutingCounts.read(output, FOLDER, SPEC)
    assert both.counted == 2 * one.counted
    for layer, of in both.layers.items():
        assert np.array_equal(of.together_EE, 2 * one.layers[layer].together_EE)
        assert np.array_equal(of.pairs.times, 2 * one.layers[layer].pairs.times)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """A line; before it the one that the bar leaves."""
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message


def test_what_cannot_be_profiled_is_refused_in_a_line(
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


def test_a_token_id_belongs_to_the_rank_of_most_of_its_experts() -> None:
    counts = RoutingCounts.read(FOLDER / "routing.safetensors", FOLDER, SPEC)
    slots = LayerSlots(range(16), ((0, 4), (4, 8), (8, 12), (12, 16)))
    embedding_VD = torch.randn(SPEC.vocab_size, 4)
    wanted = np.arange(SPEC.vocab_size)
    found = ranks_of_ids(counts, 2, slots, wanted, NearestTokens(embedding_VD))
    known = counts.layer(2).counts
    pairs_VR = np.zeros((SPEC.vocab_size, 4))
    np.add.at(pairs_VR, (known.ids_N, known.experts_N // 4), known.times_N)
    seen = np.unique(known.ids_N)
    most_V = pairs_VR.max(1)
    assert (pairs_VR[seen, found[seen]] == most_V[seen]).all()
    assert 0 < len(seen) < SPEC.vocab_size, "others belong to the rank of the nearest"
