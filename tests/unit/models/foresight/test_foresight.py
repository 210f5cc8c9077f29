"""A routing profile, and what is foretold by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from contracts.errors import CheckpointError
from models.decoder.decoder import AttentionHalf
from models.decoder.local import LocalModel
from models.experts.expert_store import ResidentStore
from models.foresight.foresight import KINDS, MOST_ROWS, Foresight, foretold, hits_by_rank
from models.foresight.routing_collection import Collection
from models.foresight.routing_profile import RoutingProfile
from models.weights.checkpoint import check_checkpoint
from tests.support.tiny_models import prompts, set_config

Checkpoints = Callable[..., Path]
LAYERS = 4


def collected(folder: Path, rows: int = 24) -> tuple[LocalModel, RoutingProfile]:
    local = LocalModel.load(folder, dtype="float32")
    store = ResidentStore(local.experts[0])
    texts = prompts(7, [60] * rows)
    return local, Collection(local.attention, store, texts).profile()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_profile_is_read_as_it_was_written(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    folder = tiny_checkpoint(family)
    _, profile = collected(folder, rows=4)
    path = tmp_path / "routing.safetensors"
    profile.write(path, folder)
    read = RoutingProfile.read(path, folder, check_checkpoint(folder))
    for name in ("means", "frequencies", "maps", "precision"):
        made, found = getattr(profile, name), getattr(read, name)
        assert made.keys() == found.keys()
        assert all(torch.equal(made[key], found[key]) for key in made)
    top_k = check_checkpoint(folder).top_k
    for each in read.frequencies.values():
        assert float(each.sum()) == pytest.approx(top_k, rel=1e-5)


def test_least_squares_foretell_better_than_the_next_router_does(
    tiny_checkpoint: Checkpoints,
) -> None:
    """On texts held out. The tiny model is random, so that nothing else is known of it."""
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS)
    _, profile = collected(folder, rows=60)
    means = {kind: float(profile.precision[kind][1:].mean()) for kind in KINDS}
    assert means["fitted"] > means["router"] + 0.02, means
    foresight = Foresight(LocalModel.load(folder, dtype="float32").attention, profile)
    assert foresight.precision[2] == profile.precision["fitted"][2].tolist()


def test_a_profile_of_another_checkpoint_or_none_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3_moe", seed=1)
    _, profile = collected(folder, rows=2)
    path = tmp_path / "routing.safetensors"
    profile.write(path, folder)
    spec = check_checkpoint(folder)
    other = tiny_checkpoint("qwen3_moe", seed=1, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="a routing profile of another checkpoint than"):
        RoutingProfile.read(path, other, spec)
    with pytest.raises(CheckpointError, match="no routing profile"):
        RoutingProfile.read(next(folder.glob("*.safetensors")), folder, spec)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        RoutingProfile.read(path, folder, spec)
    with pytest.raises(CheckpointError, match="cannot be written"):
        profile.write(tmp_path / "no" / "folder", folder)


def test_a_profile_that_is_not_finite_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    _, profile = collected(folder, rows=2)
    damaged = {layer: found.clone() for layer, found in profile.maps.items()}
    damaged[0][0, 0] = float("nan")
    profile = dataclasses.replace(profile, maps=damaged)
    profile.write(tmp_path / "routing.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"map\.0: not all of it is finite"):
        RoutingProfile.read(tmp_path / "routing.safetensors", folder, check_checkpoint(folder))


def test_a_changed_config_is_another_checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3_moe", seed=2)
    _, profile = collected(folder, rows=2)
    path = tmp_path / "routing.safetensors"
    profile.write(path, folder)
    spec = check_checkpoint(folder)
    set_config(folder, rms_norm_eps=1e-5)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        RoutingProfile.read(path, folder, spec)


@pytest.fixture
def half(tiny_checkpoint: Checkpoints) -> AttentionHalf:
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS)
    return LocalModel.load(folder, dtype="float32").attention


def test_an_expert_that_several_tokens_may_want_is_surer(half: AttentionHalf) -> None:
    foresight = Foresight(half, None)
    foresight.precision[1] = [0.8, 0.5, 0.1]
    guesses = foresight.guesses(1, [[4, 2, 0], [2, 4, 1]])
    assert [(g.expert, round(g.confidence, 3)) for g in guesses] == [
        (4, 0.9),
        (2, 0.9),
        (0, 0.1),
        (1, 0.1),
    ]


def test_precision_follows_what_comes(half: AttentionHalf) -> None:
    foresight = Foresight(half, None)
    before = list(foresight.precision[1])
    for _ in range(400):
        foresight.learn(1, [[0, 1, 2]], torch.tensor([[0, 3, 4]]))
    assert foresight.precision[1] == pytest.approx([1.0, 0.0, 0.0], abs=0.01)
    assert foresight.precision[2] == before
    foresight.learn(2, [[0, 1, 2]] * 3, torch.tensor([[0, 3, 4]]))
    assert foresight.precision[2] == before, "of rows that were not computed nothing is learned"


def test_of_a_long_prompt_some_rows_are_looked_at(half: AttentionHalf) -> None:
    router = half.router(0)
    assert router is not None
    routed = router(torch.randn(1000, half.spec.hidden_size))
    foresight = Foresight(half, None)
    ids = foresight.route(0, routed.x_TD, routed)
    assert MOST_ROWS // 2 < len(ids) <= MOST_ROWS
    before = list(foresight.precision[1])
    foresight.learn(1, ids, torch.zeros(1000, half.spec.top_k, dtype=torch.int64))
    assert foresight.precision[1] != before


def test_the_baseline_is_the_next_router_on_this_layers_state(half: AttentionHalf) -> None:
    router, following = half.router(0), half.router(1)
    assert router is not None
    assert following is not None
    routed = router(torch.randn(5, half.spec.hidden_size))
    found = foretold(half, None, "router", 0, 1, routed.x_TD, routed)
    assert torch.equal(found.topk_ids_TK, following(routed.x_TD).topk_ids_TK)
    assert Foresight(half, None).next_layer(LAYERS - 1) is None


def test_hits_are_counted_by_rank() -> None:
    hits = hits_by_rank(torch.tensor([[3, 1], [0, 2]]), torch.tensor([[1, 5], [2, 0]]))
    assert hits.tolist() == [[0.0, 1.0], [1.0, 1.0]]
