"""The planner on a simulated group whose number of ranks changes."""

from __future__ import annotations

import random

import pytest

from contracts.hardware import Hardware
from contracts.plan import Plan
from planner.costs.model_shape import ModelShape
from planner.online.planner import NoPlanError, OnlinePlanner
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape
from tests.support.simulated_group import Chunks, SimulatedGroup, hardware, setup_of

QWEN = shape(QWEN3_235B, hidden_size=512, num_hidden_layers=6, num_experts=16)
WITH_SHARED = shape(DEEPSEEK_V2, hidden_size=512, num_hidden_layers=4, n_routed_experts=16)
NOISE = 0.1
WRONG = hardware(3.0)  # a file of a machine half as fast


def batch(source: random.Random) -> list[Chunks]:
    """Return one or two micro-batches of prompts and decode steps."""
    return [
        [(start, start + source.choice((1, 16, 256))) for start in source.choices((0, 500), k=4)]
        for _ in range(source.randint(1, 2))
    ]


def taught(planner: OnlinePlanner, group: SimulatedGroup, batches: int) -> None:
    source = random.Random(batches)
    for _ in range(batches):
        of_batch, of_experts = group.run(batch(source))
        planner.observe_batch(of_batch)
        planner.observe_experts(of_experts)


def error_of(planner: OnlinePlanner, group: SimulatedGroup) -> float:
    """Return the median relative error of predicted makespans."""
    source, errors = random.Random(7), []
    for _ in range(21):
        micro_batches = batch(source)
        plan = Plan(r1=len(micro_batches))
        predicted = planner.predict_ms(plan, micro_batches)
        true = group.makespan_ms(micro_batches, plan)
        assert predicted is not None
        errors.append(abs(predicted - true) / true)
    return sorted(errors)[10]


def stages_over_truth(planner: OnlinePlanner, group: SimulatedGroup) -> list[float]:
    """Return ratios to the true times of experts and both links, for 256 tokens."""
    true = group.spec()
    me = 256 * true.tokens_per_expert_per_sample
    found = planner._following.spec(256)
    assert found is not None
    return [
        getattr(found.stages, name).at(me) / getattr(true.stages, name).at(me)
        for name in ("expert", "a2e", "e2a")
    ]


@pytest.mark.parametrize(
    ("model", "known", "size"),
    [
        (QWEN, None, (1, 3)),
        (WITH_SHARED, None, (2, 2)),
        (QWEN, WRONG, (1, 1)),
        (WITH_SHARED, WRONG, (3, 4)),
    ],
    ids=["from nothing", "from nothing, shared", "wrong file", "wrong file, shared"],
)
def test_measurements_carry_over_to_the_next_size(
    model: ModelShape, known: Hardware | None, size: tuple[int, int]
) -> None:
    """Measured times are on average a twentieth above the truth."""
    setup = setup_of(model, known)
    planner = OnlinePlanner(setup)
    taught(planner, SimulatedGroup(setup, hardware(1.5), noise=NOISE, seed=1), 60)
    version = planner.version
    planner.resize(*size)
    after = setup._replace(attention_ranks=size[0], expert_ranks=size[1])
    group = SimulatedGroup(after, hardware(1.5), noise=NOISE, seed=2)
    assert (planner.size, planner.version > version) == (size, True)
    assert planner.plan([(0, 256)]).makespan_ms > 0
    assert error_of(planner, group) < 0.12
    assert stages_over_truth(planner, group) == pytest.approx([1.05] * 3, rel=0.12)
    taught(planner, group, 30)
    assert error_of(planner, group) < 0.12


def test_cold_stages_stay_cold_and_unmeasured_stages_keep_the_file() -> None:
    planner = OnlinePlanner(setup_of(QWEN, None))
    planner.resize(1, 3)
    with pytest.raises(NoPlanError, match="too few measured times yet of: attention, expert"):
        planner.plan([(0, 16)])
    known = setup_of(QWEN, hardware())
    resized = OnlinePlanner(known._replace(refit=False))
    resized.resize(2, 3)
    anew = OnlinePlanner(known._replace(attention_ranks=2, expert_ranks=3))
    assert resized.plan([(0, 256)]) == anew.plan([(0, 256)])


def test_group_resized_back_is_predicted_as_before() -> None:
    setup = setup_of(QWEN, None)
    planner, group = OnlinePlanner(setup), SimulatedGroup(setup, hardware(), noise=NOISE, seed=1)
    taught(planner, group, 60)
    before = planner.predict_ms(Plan(), [[(0, 256)]])
    assert before is not None
    planner.resize(2, 4)
    planner.resize(1, 2)
    assert planner.predict_ms(Plan(), [[(0, 256)]]) == pytest.approx(before, rel=0.05)
