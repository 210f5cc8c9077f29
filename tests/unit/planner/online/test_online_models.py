"""Stage models learned online, also under other placements and numbers of ranks."""

import random

import pytest

from contracts.plan import Plan
from contracts.planner_messages import ExpertReport, MicroBatchReport, RowsTime
from planner.costs.routing_shape import RankShare, Spread, uniform_spread
from planner.costs.stages import Linear
from planner.online.models import OnlineModels
from planner.online.planner import OnlinePlanner
from planner.online.stages import ExpertStage, ExpertTimes, MicroBatchStage
from tests.support.model_shapes import QWEN3_235B, shape
from tests.support.simulated_group import hardware, setup_of

CALLS_MODEL = shape(QWEN3_235B, num_experts=16, num_experts_per_tok=4)
TRUE = ExpertTimes(call_ms=0.5, read_ms=14.0, token_ms=1.3, hit_per_token=0.25)


def taught_calls(rows: tuple[int, ...], slower: float = 1.0, stage: ExpertStage | None = None):  # type: ignore[no-untyped-def]
    stage = stage or ExpertStage(CALLS_MODEL, None, 64.0)
    source = random.Random(0)
    for tokens in source.sample(rows * 60, len(rows) * 60):
        x = tokens / 4
        stage.add(x, slower * TRUE.at(x) * source.uniform(0.95, 1.05))
    return stage


def test_small_calls_and_a_rare_prompt_predict_full_calls() -> None:
    """A line through them would be half too high."""
    stage = taught_calls((1,) * 20 + (2,) * 6 + (3, 4) * 3 + (40, 70))
    line = stage.around(64.0)
    assert line is not None
    assert line.at(64.0) == pytest.approx(TRUE.at(64.0), rel=0.05)
    assert line.at(16.0) == pytest.approx(TRUE.at(16.0), rel=0.05)


def test_a_line_is_exact_for_a_batch_and_its_quarter() -> None:
    for x in (0.25, 2.0, 50.0):
        line = TRUE.around(x)
        assert line.at(x) == pytest.approx(TRUE.at(x))
        assert line.at(x / 4) == pytest.approx(TRUE.at(x / 4))
        assert line.at(0.0) >= TRUE.at(0.0) - 1e-9
    every = ExpertTimes(1.0, 5.0, 1.0, hit_per_token=1.0)  # top-k of all experts reads all
    assert every.at(0.001) == pytest.approx(6.0, rel=0.001)


def test_slower_machine_is_followed() -> None:
    stage = taught_calls((1, 4, 16, 64))
    taught_calls((1, 4, 16, 64), 2.0, stage)
    line = stage.around(40.0)
    assert line is not None
    assert line.at(40.0) == pytest.approx(2 * TRUE.at(40.0), rel=0.07)


def test_stage_is_cold_below_three_sizes() -> None:
    stage = ExpertStage(CALLS_MODEL, None, 64.0)
    for _ in range(40):
        stage.add(1.0, 2.0)
        stage.add(2.0, 3.0)
    assert stage.model is stage.around(1.0) is None
    stage.add(8.0, 9.0)
    assert stage.model is not None
    prior = Linear(1.0, 2.0)  # of the hardware file
    warm = ExpertStage(CALLS_MODEL, prior, 64.0)
    assert warm.model == warm.around(3.0) == prior


LAYERS = 4


def nothing(start: int, stop: int) -> float:
    return 0.0


def taught_micro_batches() -> MicroBatchStage:
    """Return a stage with 4 ms + 0.4 per sequence to finish, 0.5 ms + 0.01 per token to send."""
    stage = MicroBatchStage(LAYERS)
    for _ in range(60):
        for rows in (1, 4, 16, 32):
            batch = [(50, 51)] * rows
            finish_ms, send_ms = 4.0 + 0.4 * rows, 0.5 + 0.01 * rows
            stage.add(MicroBatchReport(batch, 9.0, 0.0, finish_ms, send_ms))
    return stage


def test_finish_cost_is_divided_over_layers_and_unreported_cost_is_zero() -> None:
    bare = MicroBatchStage(LAYERS)
    for _ in range(60):
        bare.add(MicroBatchReport([(0, 10)], 9.0))
    assert bare.launch_ms(1.0) == bare.chunk_time(nothing, 1.0)(0, 10) == 0.0
    stage = taught_micro_batches()
    assert stage.launch_ms(0.0) == pytest.approx(1.0, rel=0.01)
    assert stage.chunk_time(nothing, 0.0)(50, 51) == pytest.approx(0.1, rel=0.01)


def test_further_expert_rank_costs_a_packet_each_way() -> None:
    stage = taught_micro_batches()
    twice = stage.launch_ms(1.0) - stage.launch_ms(0.0)
    assert twice == pytest.approx(1.0, rel=0.01)
    tokens = stage.chunk_time(nothing, 1.0)(0, 100) - stage.chunk_time(nothing, 0.0)(0, 100)
    assert tokens == pytest.approx(2.0, rel=0.01)
    assert stage.launch_ms(-0.5) == stage.launch_ms(0.0)  # of fewer ranks nothing is known


MODEL = shape(QWEN3_235B, num_experts=16, num_experts_per_tok=2, hidden_size=192)
SETUP = setup_of(MODEL, hardware())
UNIFORM = uniform_spread(MODEL, 2)
# Half the copies beyond one, and one rank with 1.5 times the mean's pairs.
GROUPED = Spread(2, 8, RankShare(0.64, 8.0), RankShare(0.8, 12.0))


def stages(models: OnlineModels):  # type: ignore[no-untyped-def]
    spec = models.spec()
    assert spec is not None
    return spec.stages


def test_links_use_busiest_rows_and_experts_busiest_pairs() -> None:
    models = OnlineModels(SETUP)
    before = stages(models)
    models.spread_over(UNIFORM)
    assert stages(models) == before
    unit = models.unit_ms()  # of one attention rank, whose link all copies use
    assert unit is not None
    assert unit[1] == pytest.approx(2e-6 * 192 * 2, rel=0.05)  # and the pairs' 8 bytes
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
        times = [RowsTime(rows, 0.1 + 0.01 * pairs)]
        models.add_experts(ExpertReport(rank="expert-0", experts=times))
    models.spread_over(UNIFORM)
    per_me = 0.01 * 8  # pairs of a rank for each token per expert
    assert stages(models).expert.at(48) == pytest.approx(0.1 + 48 * per_me, rel=0.01)
    unit = models.unit_ms()
    assert unit is not None
    assert unit[0] == pytest.approx(0.01, rel=0.01)


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
