"""Stage models and the spread of tokens over expert ranks."""

from __future__ import annotations

import pytest

from contracts.plan import Plan
from contracts.planner_messages import ExpertReport, RowsTime
from planner.costs.routing_shape import RankShare, Spread, uniform_spread
from planner.online.models import OnlineModels
from planner.online.planner import OnlinePlanner
from tests.support.model_shapes import QWEN3_235B, shape
from tests.support.simulated_group import hardware, setup_of

MODEL = shape(QWEN3_235B, num_experts=16, num_experts_per_tok=2, hidden_size=192)
SETUP = setup_of(MODEL, hardware())
UNIFORM = uniform_spread(MODEL, 2)
# Half the copies beyond one, and one rank with 1.5 times the mean's pairs.
GROUPED = Spread(2, 8, RankShare(0.64, 8.0), RankShare(0.8, 12.0))


def stages(models: OnlineModels):  # type: ignore[no-untyped-def]
    spec = models.spec()
    assert spec is not None
    return spec.stages


def test_uniform_routing_changes_nothing() -> None:
    models = OnlineModels(SETUP)
    before = stages(models)
    models.spread_over(UNIFORM)
    assert stages(models) == before


def test_links_use_busiest_rows_and_experts_busiest_pairs() -> None:
    models = OnlineModels(SETUP)
    before = stages(models)
    models.spread_over(GROUPED)
    after = stages(models)
    assert after.e2a.beta_ms == pytest.approx(before.e2a.beta_ms * 0.8 / UNIFORM.mean.rows)
    assert after.expert.beta_ms == pytest.approx(1.5 * before.expert.beta_ms)
    assert after.expert.alpha_ms == before.expert.alpha_ms


@pytest.mark.parametrize("learned_under", [UNIFORM, GROUPED])
def test_learned_models_hold_under_another_placement(learned_under: Spread) -> None:
    """An expert call takes 0.1 ms and 0.01 ms per pair."""
    models = OnlineModels(SETUP)
    models.spread_over(learned_under)
    mean = learned_under.mean
    for tokens in (64, 128, 256, 512) * 160:
        rows, pairs = round(tokens * mean.rows), tokens * 2 * mean.pairs / 16
        models.add_experts(
            ExpertReport(rank="expert-0", experts=[RowsTime(rows, 0.1 + 0.01 * pairs)])
        )
    models.spread_over(UNIFORM)
    per_me = 0.01 * 8  # pairs of a rank for each token per expert
    assert stages(models).expert.at(48) == pytest.approx(0.1 + 48 * per_me, rel=0.01)
    unit = models.unit_ms()
    assert unit is not None
    assert unit[0] == pytest.approx(0.01, rel=0.01)


def test_copy_time_is_its_share_of_the_link() -> None:
    """One attention rank and 2 expert ranks: all copies use its link."""
    unit = OnlineModels(SETUP).unit_ms()
    assert unit is not None
    row_bytes = 192 * 2
    assert unit[1] == pytest.approx(2e-6 * row_bytes, rel=0.05)  # and the pairs' 8 bytes


def test_spread_change_updates_predictions_and_invalidates_plans() -> None:
    planner = OnlinePlanner(SETUP)
    batch, version = [[(0, 4096)]], planner.version
    before = planner.predict_ms(Plan(), batch)
    planner.spread_over(GROUPED)
    after = planner.predict_ms(Plan(), batch)
    assert before is not None
    assert after is not None
    assert after > before
    assert planner.version == version + 1
