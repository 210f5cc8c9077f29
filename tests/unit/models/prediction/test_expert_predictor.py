"""Predictions of experts from profiles and from routing counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.errors import CheckpointError
from models.decoder.decoder import AttentionHalf
from models.experts.expert_store import ResidentStore
from models.prediction.bounded_counts import RoutingPaths
from models.prediction.count_predictor import (
    BOTH,
    MARGINAL,
    MORE_CONFIDENT,
    PREVIOUS,
    TWO_LAYERS,
    TWO_TOKENS,
    CountPredictor,
    NearestTokens,
)
from models.prediction.count_predictor import TOKEN as BY_TOKEN
from models.prediction.expert_predictor import MAX_ROWS, ExpertPredictor
from models.prediction.profile_builder import ProfileBuilder
from models.prediction.routing_counts import CountedModel, RoutingCounter, RoutingCounts
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
from tests.support.local_model import LocalModel
from tests.support.tiny_models import Checkpoints, prompts, set_config

LAYERS = 4


def collected(folder: Path, rows: int = 24) -> tuple[LocalModel, RoutingProfile]:
    local = LocalModel.load(folder, dtype="float32")
    store = ResidentStore(local.experts[0])
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
    predictor.before.by_layer[1] = [0.8, 0.5, 0.1]
    predicted = predictor.before.predicted_experts(1, [[4, 2, 0], [2, 4, 1]])
    found = [(each.expert, round(each.confidence, 3)) for each in predicted]
    assert found == [(4, 0.9), (2, 0.9), (0, 0.1), (1, 0.1)]


def test_precision_follows_actual_experts(half: AttentionHalf) -> None:
    predictor = ExpertPredictor(half, None)
    before = list(predictor.before.by_layer[1])
    for _ in range(400):
        predictor.before.update(1, [[0, 1, 2]], torch.tensor([[0, 3, 4]]))
    assert predictor.before.by_layer[1] == pytest.approx([1.0, 0.0, 0.0], abs=0.01)
    assert predictor.before.by_layer[2] == before
    predictor.before.update(2, [[0, 1, 2]] * 3, torch.tensor([[0, 3, 4]]))
    assert predictor.before.by_layer[2] == before, "rows that were not computed do not count"


def test_long_prompt_is_subsampled(half: AttentionHalf) -> None:
    router = half.router(0)
    assert router is not None
    routed = router(torch.randn(1000, half.spec.hidden_size))
    predictor = ExpertPredictor(half, None)
    found = predictor.predict(0, routed.x_TD, routed)
    assert found is not None
    ids = found.ids
    assert MAX_ROWS // 2 < len(ids) <= MAX_ROWS
    before = list(predictor.before.by_layer[1])
    predictor.before.update(1, ids, torch.zeros(1000, half.spec.top_k, dtype=torch.int64))
    assert predictor.before.by_layer[1] != before


def test_router_prediction_applies_next_router_to_current_state(half: AttentionHalf) -> None:
    router, following = half.router(0), half.router(1)
    assert router is not None
    assert following is not None
    routed = router(torch.randn(5, half.spec.hidden_size))
    found = predict_routing(half, None, "router", 0, 1, routed.x_TD, routed)
    assert torch.equal(found.topk_ids_TK, following(routed.x_TD).topk_ids_TK)
    predictor = ExpertPredictor(half, None)
    assert predictor.predict(LAYERS - 1, routed.x_TD, routed) is None


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


def test_profiled_tokens_predict_first_layer(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    local, profile = collected(folder, rows=60)
    predictor = ExpertPredictor(local.attention, profile)
    found = predictor.predict_first(torch.tensor([5, 9]))
    assert found is not None
    assert found.layer == local.spec.moe_layers[0]
    assert found.ids == profile.tokens_VK[[5, 9]].tolist()
    layer = local.spec.moe_layers[1]
    assert predictor.before.by_layer[layer] == profile.precision["fitted"][1].tolist()
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


E, K, V = 8, 2, 30
OF = CountedModel(b"c" * 32, b"t" * 32, (0, 1, 2), E, K, V)


def routed(ids_T2: np.ndarray, wanted_TL: np.ndarray) -> tuple[RoutingCounts, RoutingPaths]:
    """Return routing of each token to the wanted expert and the next one."""
    paths_TLK = np.stack([wanted_TL % E, (wanted_TL + 1) % E], 2)
    counter = RoutingCounter(OF)
    counter.add(ids_T2, paths_TLK)
    return counter.counts(), RoutingPaths(ids_T2.astype(np.int32), paths_TLK.astype(np.int16))


def ids(count: int = 600, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (count, 2))


def hit_fraction(chances_TE: np.ndarray, experts_TK: np.ndarray) -> float:
    """Return the fraction of the tokens' experts among the K most likely."""
    likeliest_TK = np.argsort(-chances_TE, axis=1)[:, :K]
    return float((likeliest_TK[:, :, None] == experts_TK[:, None, :]).any(1).mean())


def hits(counts: RoutingCounts, tokens: RoutingPaths, layer: int) -> dict[str, float]:
    found = CountPredictor(counts, layer).predict(tokens)
    assert all(chances.sum(1) == pytest.approx(K, abs=1e-3) for chances in found.values())
    return {name: hit_fraction(each, tokens.paths_PLK[:, layer]) for name, each in found.items()}


def test_one_or_two_tokens_determine_experts() -> None:
    ids_T2 = ids()
    found = hits(*routed(ids_T2, np.repeat(ids_T2[:, :1], 3, 1)), 0)
    assert found.keys() == {MARGINAL, BY_TOKEN, TWO_TOKENS}
    assert found[BY_TOKEN] == found[TWO_TOKENS] == 1.0
    assert found[MARGINAL] < 0.6
    ids_T2 %= 6
    found = hits(*routed(ids_T2, np.repeat(ids_T2.sum(1, keepdims=True), 3, 1)), 0)
    assert found[TWO_TOKENS] == 1.0
    assert found[BY_TOKEN] < 0.8


def test_previous_layers_determine_experts() -> None:
    random = np.random.default_rng(1)
    before_T2 = random.integers(0, E, (2000, 2))
    wanted_TL = np.concatenate([before_T2, before_T2.sum(1, keepdims=True)], 1)
    found = hits(*routed(ids(2000), wanted_TL), 2)
    assert found[TWO_LAYERS] == 1.0
    assert found[MORE_CONFIDENT] > 0.99
    assert max(found[BY_TOKEN], found[PREVIOUS], found[MARGINAL]) < 0.6
    wanted_TL[:, 2] = wanted_TL[:, 1] + 3
    assert hits(*routed(ids(2000), wanted_TL), 2)[PREVIOUS] == 1.0


def test_token_and_previous_layer_predict_better_than_either() -> None:
    random = np.random.default_rng(2)
    ids_T2, before_T = ids(4000) % E, random.integers(0, E, 4000)
    leans = random.random(4000) < 0.5
    wanted_T = np.where(leans, ids_T2[:, 0], before_T)
    counts, tokens = routed(ids_T2, np.stack([before_T, before_T, wanted_T], 1))
    found = hits(counts, tokens, 2)
    assert found[BOTH] > max(found[BY_TOKEN], found[PREVIOUS]) + 0.01


def test_unknown_token_gets_marginal_probabilities() -> None:
    counts, _ = routed(ids() % 10, np.zeros((600, 3), np.int64))
    other = RoutingPaths(np.array([[20, 21]], np.int32), np.array([[[4, 5]] * 3], np.int16))
    for name, probabilities in CountPredictor(counts, 1).predict(other).items():
        assert probabilities[0, :2] == pytest.approx([1.0, 1.0], abs=1e-6), name


def test_unprofiled_token_uses_counts_of_nearest_token() -> None:
    """Ids from 10 on are not profiled, and their embeddings are near id % 10."""
    ids_T2 = ids(400) % 10
    counts, _ = routed(ids_T2, np.repeat(ids_T2[:, :1], 3, 1))
    embedding_VD = torch.eye(10).repeat(3, 1) + 0.1 * torch.rand(V, 10)
    unseen = np.arange(10, V, dtype=np.int32)
    wanted_TK = np.stack([unseen % 10 % E, (unseen % 10 + 1) % E], 1)
    tokens = RoutingPaths(np.stack([unseen, unseen], 1), np.repeat(wanted_TK[:, None], 3, 1))
    without = CountPredictor(counts, 0).predict(tokens)[BY_TOKEN]
    found = CountPredictor(counts, 0, NearestTokens(embedding_VD)).predict(tokens)[BY_TOKEN]
    assert hit_fraction(found, wanted_TK) == 1.0
    assert hit_fraction(without, wanted_TK) < 0.7
