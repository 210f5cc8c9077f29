"""The online planner on a simulated group with known times: warm, cold, drifting."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.plan import Plan
from contracts.planner_messages import Batch, MicroBatchReport
from planner.online.attention_stage import AttentionStage
from planner.online.buckets import STEPS_PER_OCTAVE, bucket_of
from planner.online.models import OnlineModels
from planner.online.planner import REPORTS_BETWEEN, NoPlanError, OnlinePlanner
from planner.schedule.batch_plan import LEAST_GAIN, NewTokens, plan_batch
from planner.schedule.plan_fit import MORE_TOKENS, fit_plan
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape
from tests.support.simulated_group import Chunks, SimulatedGroup, hardware, setup_of

QWEN = shape(QWEN3_235B, hidden_size=512, num_hidden_layers=6, num_experts=16)
WITH_SHARED = shape(DEEPSEEK_V2, hidden_size=512, num_hidden_layers=4, n_routed_experts=16)
LENGTHS = (1, 4, 16, 64, 256, 1024)
NOISE = 0.1  # times are up to so much longer than the models say: 5 % in the mean

some = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32)
sequences = st.builds(
    lambda start, new: (start, start + new), st.integers(0, 2000), st.sampled_from(LENGTHS)
)
batches = st.lists(sequences, min_size=1, max_size=24)


def traffic(seed: int) -> Iterator[list[Chunks]]:
    """Yield batches of one to three micro-batches of prompts and decode steps."""
    source = random.Random(seed)
    while True:
        yield [
            [_sequence(source) for _ in range(source.choice((1, 2, 5, 10)))]
            for _ in range(source.randint(1, 3))
        ]


def _sequence(source: random.Random) -> tuple[int, int]:
    start = source.choice((0, 0, 128, 1000))
    return start, start + source.choice(LENGTHS[start == 0 :])


def taught(planner: OnlinePlanner, group: SimulatedGroup, batches: int, seed: int = 0) -> None:
    for micro_batches, _ in zip(traffic(seed), range(batches), strict=False):
        batch, experts = group.run(micro_batches)
        planner.observe_batch(batch)
        planner.observe_experts(experts)


def error_of(planner: OnlinePlanner, group: SimulatedGroup, seed: int) -> float:
    """Return the median relative error of predicted makespans on new traffic."""
    errors = []
    for micro_batches, _ in zip(traffic(seed), range(41), strict=False):
        plan = Plan(r1=len(micro_batches))
        predicted, true = (
            planner.predict_ms(plan, micro_batches),
            group.makespan_ms(micro_batches, plan),
        )
        assert predicted is not None
        errors.append(abs(predicted - true) / true)
    return sorted(errors)[20]


@some
@given(batches, seeds)
def test_bucket_is_independent_of_sequence_order(batch: Batch, seed: int) -> None:
    assert bucket_of(random.Random(seed).sample(batch, len(batch))) == bucket_of(batch)


@some
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_prompts_share_a_bucket_only_within_a_step(a: int, b: int) -> None:
    alike = bucket_of([(0, a + 1)]) == bucket_of([(0, b + 1)])
    ratio = max(a + 1, b + 1) / min(a + 1, b + 1)
    assert not (alike and ratio >= 2 ** (1 / STEPS_PER_OCTAVE))


def test_small_batches_of_different_sizes_are_in_different_buckets() -> None:
    rows = [bucket_of([(50, 51)] * count) for count in range(1, 8)]
    assert len(set(rows)) == 7


def test_cold_planner_names_the_unmeasured_stages() -> None:
    planner = OnlinePlanner(setup_of(WITH_SHARED, None))
    with pytest.raises(NoPlanError, match="attention, expert, a2e, e2a, shared"):
        planner.plan([(0, 64)])


def test_attention_is_learned_from_few_sizes_after_uninformative_times() -> None:
    stage = AttentionStage(QWEN, None)
    sizes = (10, 100, 1000)

    def add(times_ms: tuple[float, ...]) -> None:
        for tokens, ms in zip(sizes, times_ms, strict=True):
            stage.add(MicroBatchReport([(0, tokens)], ms))

    for _ in range(8):
        add((3.0, 2.0, 1.0))  # on a machine that was busy at first
    assert stage.cost is None
    for _ in range(8):
        add((0.2, 0.4, 2.4))
    assert stage.cost is not None
    assert stage.chunk_time()(0, 1000) > stage.chunk_time()(0, 100) > 0


def test_a_hardware_file_makes_the_first_answer_warm() -> None:
    setup = setup_of(QWEN, hardware())
    group = SimulatedGroup(setup, hardware(), noise=0.0, seed=0)
    batch = [(0, 300), (0, 200), (40, 41)]
    found = OnlinePlanner(setup).plan(batch)
    best = plan_batch(
        group.spec(), [NewTokens(*chunk) for chunk in batch], group.chunk_ms, beyond=True
    )
    assert found.makespan_ms == pytest.approx(best.makespan_ms, rel=1e-6)


@settings(deadline=None, max_examples=6)
@given(seeds, st.sampled_from([QWEN, WITH_SHARED]))
def test_a_cold_planner_learns_to_predict_within_five_percent(seed: int, model: object) -> None:
    setup = setup_of(model, None)  # type: ignore[arg-type]
    planner = OnlinePlanner(setup)
    group = SimulatedGroup(setup, hardware(), noise=NOISE, seed=seed)
    taught(planner, group, 150, seed)
    assert error_of(planner, group, seed + 1) < 0.05 + NOISE / 2


@settings(deadline=None, max_examples=6)
@given(seeds, st.sampled_from([1, 3]), st.sampled_from([1, 2, 3]))
def test_stages_are_learned_in_solver_units(
    seed: int, attention_ranks: int, expert_ranks: int
) -> None:
    setup = setup_of(WITH_SHARED, None, attention_ranks=attention_ranks, expert_ranks=expert_ranks)
    models = OnlineModels(setup)
    group = SimulatedGroup(setup, hardware(), noise=0.0, seed=seed)
    for micro_batches, _ in zip(traffic(seed), range(100), strict=False):
        batch, experts = group.run(micro_batches)
        models.add_batch(batch)
        models.add_experts(experts)
    learned, true = models.spec(), group.spec()
    assert learned is not None
    for tokens in (64, 1024):
        me = true.me(tokens, 1)
        assert learned.me(tokens, 1) == me
        for stage in ("expert", "a2e", "e2a"):
            expected = getattr(true.stages, stage).at(me)
            assert getattr(learned.stages, stage).at(me) == pytest.approx(expected, rel=0.05)
        assert learned.shared.at(tokens) == pytest.approx(true.shared.at(tokens), rel=0.05)
        chunk_ms = models.attention.chunk_time()(0, tokens)
        assert chunk_ms == pytest.approx(group.chunk_ms(0, tokens), rel=0.05)


@settings(deadline=None, max_examples=6)
@given(seeds)
def test_learned_plans_are_close_to_optimal(seed: int) -> None:
    setup = setup_of(QWEN, None, beyond=False)
    planner = OnlinePlanner(setup)
    group = SimulatedGroup(setup, hardware(), noise=NOISE, seed=seed)
    taught(planner, group, 150, seed)
    batch = [(0, 512), (0, 300), (0, 200), (64, 65), (700, 701)]
    plan = planner.plan(batch).plan
    sizes = plan.micro_batch_samples
    cut, first = [], 0
    for size in sizes:
        cut.append(batch[first : first + size])
        first += size
    exact = [NewTokens(*chunk) for chunk in batch]
    best_ms = plan_batch(group.spec(), exact, group.chunk_ms).makespan_ms + 0.5
    assert group.makespan_ms(cut, plan) <= 1.08 * best_ms


@settings(deadline=None, max_examples=6)
@given(seeds)
def test_slower_machine_is_followed(seed: int) -> None:
    setup = setup_of(QWEN, hardware())
    planner = OnlinePlanner(setup)
    slower = SimulatedGroup(setup, hardware(slower=2.0), noise=NOISE, seed=seed)
    before = planner.version
    assert error_of(planner, slower, seed + 1) > 0.15
    taught(planner, slower, 200, seed)
    assert planner.version > before
    assert error_of(planner, slower, seed + 1) < 0.05 + NOISE / 2


@settings(deadline=None, max_examples=10)
@given(seeds, st.floats(10, 1000))
def test_single_outlier_changes_no_plan(seed: int, wild: float) -> None:
    setup = setup_of(QWEN, hardware())
    planner = OnlinePlanner(setup)
    group = SimulatedGroup(setup, hardware(), noise=NOISE, seed=seed)
    taught(planner, group, 60, seed)
    usual, version = [[(0, 256)], [(0, 128)]], planner.version
    before = planner.predict_ms(Plan(r1=2), usual)
    planner.observe_batch(group.run(usual, wild=wild)[0])
    after = planner.predict_ms(Plan(r1=2), usual)
    assert planner.version == version
    assert before is not None
    assert after == pytest.approx(before, rel=0.05)


@some
@given(batches)
def test_batch_is_cut_only_for_the_least_gain(batch: Batch) -> None:
    setup = setup_of(QWEN, hardware(), max_batch_tokens=30_000)
    group = SimulatedGroup(setup, hardware(), noise=0.0, seed=0)
    planned = OnlinePlanner(setup).plan(batch)
    uncut_ms = group.makespan_ms([batch], Plan()) - 0.5
    if (planned.plan.r1, planned.plan.r2) == (1, 1):
        assert planned.makespan_ms == pytest.approx(uncut_ms)
    else:
        assert planned.makespan_ms <= (1 - LEAST_GAIN) * uncut_ms * (1 + 1e-9)


def test_plans_are_cached_until_models_change() -> None:
    setup = setup_of(QWEN, hardware())
    planner = OnlinePlanner(setup)
    batch, alike = [(0, 400), (0, 100)], [(0, 405), (0, 101)]
    first = planner.plan(batch)
    assert planner.known(batch) is first
    assert planner.known(alike) is first
    assert planner.known([(0, 4000)]) is None
    taught(planner, SimulatedGroup(setup, hardware(slower=3.0), noise=0.0, seed=0), 60)
    assert planner.version > 1
    assert planner.known(batch) is None


def test_model_version_changes_at_most_once_per_report_interval() -> None:
    setup = setup_of(QWEN, hardware())
    planner = OnlinePlanner(setup)
    taught(planner, SimulatedGroup(setup, hardware(slower=8.0), noise=0.0, seed=0), 100)
    assert 1 < planner.version <= 1 + 2 * 100 / REPORTS_BETWEEN


def test_without_hardware_file_no_plan_for_batches_far_above_measured() -> None:
    setup = setup_of(QWEN, None)
    planner = OnlinePlanner(setup)
    group = SimulatedGroup(setup, hardware(), noise=0.0, seed=0)
    for tokens in (8, 16, 32, 64) * 10:
        batch, experts = group.run([[(0, tokens)]])
        planner.observe_batch(batch)
        planner.observe_experts(experts)
    assert planner.plan([(0, 200)]).makespan_ms > 0
    with pytest.raises(NoPlanError, match="4096 tokens"):
        planner.plan([(0, 4096)])


def test_models_are_fixed_without_refit() -> None:
    setup = setup_of(QWEN, hardware(), refit=False)
    planner = OnlinePlanner(setup)
    before = planner.plan([(0, 400)]).makespan_ms
    taught(planner, SimulatedGroup(setup, hardware(slower=3.0), noise=0.0, seed=0), 60)
    assert (planner.version, planner.plan([(0, 400)]).makespan_ms) == (1, before)


def test_batch_that_does_not_fit_is_rejected_with_its_size() -> None:
    planner = OnlinePlanner(setup_of(QWEN, hardware(), max_batch_tokens=100))
    with pytest.raises(NoPlanError, match="101 new tokens"):
        planner.plan([(0, 101)])


@settings(deadline=None, max_examples=60)
@given(batches, batches)
def test_plan_is_used_only_for_a_batch_that_fits(planned: Batch, formed: Batch) -> None:
    planner = OnlinePlanner(setup_of(QWEN, hardware(), max_batch_tokens=30_000))
    answer = planner.plan(planned).plan
    plan = fit_plan(answer, planned, formed, max_tokens=30_000)
    tokens = sum(stop - start for start, stop in formed)
    if plan is None:
        return
    assert tokens <= MORE_TOKENS * sum(stop - start for start, stop in planned)
    assert plan.r1 // max(1, len(plan.sequence_chunks)) <= len(formed)
    assert not plan.micro_batch_samples or sum(plan.micro_batch_samples) == len(formed)
    assert (plan.r2, plan.order, plan.sequence_chunks) == (
        answer.r2, answer.order, answer.sequence_chunks,
    )  # fmt: skip


@some
@given(batches)
def test_plan_fits_its_own_batch(batch: Batch) -> None:
    plan = OnlinePlanner(setup_of(QWEN, hardware(), max_batch_tokens=30_000)).plan(batch).plan
    assert fit_plan(plan, batch, batch, max_tokens=30_000) == plan


def test_micro_batch_sizes_remain_only_for_a_similar_batch() -> None:
    plan, planned = Plan(r1=2, micro_batch_samples=(1, 3)), [(0, 90), (0, 30), (0, 30), (0, 30)]
    general = Plan(r1=2)

    def fitted(batch: Chunks) -> Plan | None:
        return fit_plan(plan, planned, batch, max_tokens=1000)

    assert fitted([(0, 95), (0, 30), (0, 28), (0, 32)]) == plan
    assert fitted([(0, 30), (0, 30), (0, 30), (0, 90)]) == general
    assert fitted([(0, 90), (0, 45), (0, 45)]) == general


def test_batch_above_token_limit_gets_no_plan() -> None:
    assert fit_plan(Plan(r1=1), [(0, 100)], [(0, 101)], max_tokens=100) is None
