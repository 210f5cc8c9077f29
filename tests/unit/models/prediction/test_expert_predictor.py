"""Predictions of experts from profiles, and of ids without routing counts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.errors import CheckpointError
from models.decoder.decoder import AttentionHalf
from models.prediction.expert_predictor import MAX_ROWS, ExpertPredictor, PredictedRouting
from models.prediction.nearest_ids import NearestIds
from models.prediction.profile_builder import ProfileBuilder
from models.prediction.routing_profile import (
    PREDICTOR_KINDS,
    TOKEN,
    EstimatorSamples,
    RoutingProfile,
    predict_routing,
    quasi_hidden,
    train_estimator,
)
from models.weights.checkpoint import check_checkpoint
from tests.support.local_model import LocalModel, resident_store
from tests.support.tiny_models import Checkpoints, prompts, set_config

LAYERS = 4


def collected(folder: Path, rows: int = 24) -> tuple[LocalModel, RoutingProfile]:
    local = LocalModel.load(folder, dtype="float32")
    store = resident_store(local.experts[0])
    texts = prompts(7, [60] * rows)
    return local, ProfileBuilder(local.attention, store, texts).profile()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_written_profile_is_read_unchanged(
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
    assert torch.equal(read.tokens_VK, profile.tokens_VK)
    for name, tensor in profile.estimator.tensors().items():
        assert torch.equal(getattr(read.estimator, name), tensor)
    top_k = check_checkpoint(folder).top_k
    for each in read.frequencies.values():
        assert float(each.sum()) == pytest.approx(top_k, rel=1e-5)


def test_foreign_or_damaged_profile_is_rejected(
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
    with pytest.raises(CheckpointError, match="not a routing profile"):
        RoutingProfile.read(next(folder.glob("*.safetensors")), folder, spec)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        RoutingProfile.read(path, folder, spec)
    maps = {layer: torch.full_like(each, float("nan")) for layer, each in profile.maps.items()}
    dataclasses.replace(profile, maps=maps).write(path, folder)
    with pytest.raises(CheckpointError, match=r"map\.0: not all values are finite"):
        RoutingProfile.read(path, folder, spec)
    with pytest.raises(CheckpointError, match="cannot be written"):
        profile.write(tmp_path / "no" / "folder", folder)
    profile.write(path, folder)
    set_config(folder, rms_norm_eps=1e-5)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        RoutingProfile.read(path, folder, spec)


@pytest.fixture
def half(tiny_checkpoint: Checkpoints) -> AttentionHalf:
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=LAYERS)
    return LocalModel.load(folder, dtype="float32").attention


def test_confidence_combines_predictions_of_tokens(half: AttentionHalf) -> None:
    predictor = ExpertPredictor(half, None)
    predictor.precision[1] = [0.8, 0.5, 0.1]
    predicted = predictor.experts(PredictedRouting(1, [[4, 2, 0], [2, 4, 1]]))
    found = [(each.expert, round(each.confidence, 3)) for each in predicted]
    assert found == [(4, 0.9), (2, 0.9), (0, 0.1), (1, 0.1)]


def test_precision_follows_actual_experts(half: AttentionHalf) -> None:
    predictor = ExpertPredictor(half, None)
    before = list(predictor.precision[1])
    for _ in range(400):
        predictor.update(PredictedRouting(1, [[0, 1, 2]]), torch.tensor([[0, 3, 4]]))
    assert predictor.precision[1] == pytest.approx([1.0, 0.0, 0.0], abs=0.01)
    assert predictor.precision[2] == before
    predictor.update(PredictedRouting(2, [[0, 1, 2]] * 3), torch.tensor([[0, 3, 4]]))
    assert predictor.precision[2] == before, "rows that were not computed do not count"


def test_long_prompt_is_subsampled(half: AttentionHalf) -> None:
    router = half.router(0)
    assert router is not None
    routed = router(torch.randn(1000, half.spec.hidden_size))
    predictor = ExpertPredictor(half, None)
    found = predictor.predict(0, routed.x_TD, routed)
    assert found is not None
    ids = found.ids
    assert MAX_ROWS // 2 < len(ids) <= MAX_ROWS
    before = list(predictor.precision[1])
    predictor.update(found, torch.zeros(1000, half.spec.top_k, dtype=torch.int64))
    assert predictor.precision[1] != before


def test_router_prediction_applies_next_router_to_current_state(half: AttentionHalf) -> None:
    router, following = half.router(0), half.router(1)
    assert router is not None
    assert following is not None
    routed = router(torch.randn(5, half.spec.hidden_size))
    found = predict_routing(half, None, "router", 0, 1, routed.x_TD, routed)
    assert torch.equal(found.topk_ids_TK, following(routed.x_TD).topk_ids_TK)
    predictor = ExpertPredictor(half, None)
    assert predictor.predict(LAYERS - 1, routed.x_TD, routed) is None


@pytest.mark.long
def test_estimator_learns_nonlinear_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = {}
    for layer in (0, 1):
        q_ND = torch.randn(10_000, 32, generator=generator)
        map_DE = torch.randn(32, 4, generator=generator)
        samples[layer] = EstimatorSamples(q_ND, 3.0 * (q_ND @ map_DE).abs())
    estimator = train_estimator(samples, 2, sigmoid=False)
    for layer, (q_ND, logits_NE) in samples.items():
        best = logits_NE.argmax(-1)
        alike = estimator.logits(layer, q_ND).argmax(-1) == best
        ones_ND = torch.cat([q_ND, torch.ones(10_000, 1)], 1)
        fitted = (ones_ND @ torch.linalg.lstsq(ones_ND, logits_NE).solution).argmax(-1) == best
        found = float(alike.float().mean()), float(fitted.float().mean())
        assert found[0] > found[1] + 0.3, found


@pytest.mark.long
def test_profiled_tokens_predict_first_layer(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    local, profile = collected(folder, rows=60)
    predictor = ExpertPredictor(local.attention, profile)
    found = predictor.predict_first(torch.tensor([5, 9]))
    assert found is not None
    assert found.layer == local.spec.moe_layers[0]
    assert found.ids == profile.tokens_VK[[5, 9]].tolist()
    layer = local.spec.moe_layers[1]
    assert predictor.precision[layer] == profile.precision["fitted"][1].tolist()
    means = {kind: float(profile.precision[kind][1:].mean()) for kind in PREDICTOR_KINDS}
    assert means["fitted"] > means["router"] + 0.02, means
    even = local.spec.top_k / local.spec.num_experts
    assert float(profile.precision[TOKEN][0].mean()) > 1.5 * even
    assert ExpertPredictor(local.attention, None).predict_first(torch.tensor([5])) is None


def test_mean_of_shared_experts_is_added_once(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    local, without = collected(folder, rows=4)
    monkeypatch.setattr(AttentionHalf, "shared", lambda *_: torch.full_like(_[2], 0.25))
    _, profile = collected(folder, rows=4)
    layer = local.spec.moe_layers[0]
    router = local.attention.router(layer)
    assert router is not None
    routed = router(torch.randn(9, local.spec.hidden_size))
    zeros_TD = torch.zeros_like(routed.x_TD)
    more_TD = quasi_hidden(profile.means[layer], zeros_TD, routed) - quasi_hidden(
        without.means[layer], zeros_TD, routed
    )
    torch.testing.assert_close(more_TD, torch.full_like(more_TD, 0.25))


def test_ids_without_counts_are_replaced_by_the_nearest_with_counts() -> None:
    """Ids from 10 on have no counts; each is parallel to id % 10, and longer."""
    generator = torch.Generator().manual_seed(0)
    counted_ND = torch.rand((10, 16), generator=generator) - 0.5
    embedding_VD = torch.cat([(1 + part) * counted_ND for part in range(20)])
    nearest = NearestIds(embedding_VD, np.arange(1, 10))
    ids_T = np.arange(200)
    for _ in range(3):  # calls with more new ids than one replaces
        found_T = nearest.replace(ids_T)
    has_own_T = ids_T % 10 > 0
    assert found_T[has_own_T].tolist() == (ids_T % 10)[has_own_T].tolist()
    assert set(found_T[~has_own_T]) <= set(range(1, 10))
    assert NearestIds(embedding_VD, np.arange(0)).replace(ids_T).tolist() == ids_T.tolist()
