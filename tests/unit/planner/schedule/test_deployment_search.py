"""Splits of N devices against no split."""

from __future__ import annotations

import msgspec
import pytest

from cluster.fleet.hardware import load_hardware
from contracts.errors import ResourceError
from contracts.hardware import Hardware, LinkCost
from planner.costs.stages import PlanSpec
from planner.schedule.alternatives import Workload, alternatives
from planner.schedule.deployment_search import busy_fractions, search
from planner.schedule.solver import PlannedBatch, solve
from tests.support.model_shapes import DEEPSEEK_V2, QWEN3_235B, shape

H200 = load_hardware("h200-node")
GIB = float(1 << 30)


def workload(
    hardware: Hardware = H200, *, devices: int = 8, tokens: int = 2048, usable_gib: float = 118.0
) -> Workload:
    return Workload(shape(QWEN3_235B), hardware, devices, tokens, 0, usable_gib * GIB)


def with_link(ms_per_byte: float) -> Hardware:
    link = LinkCost(backend="nccl", direction="both", alpha_ms=0.02, ms_per_byte=ms_per_byte)
    return msgspec.structs.replace(H200, links=[link])


def best(spec: PlanSpec) -> PlannedBatch:
    return solve(spec).best


def test_best_split_has_most_samples_per_second() -> None:
    verdict = search(workload(), best)
    assert len(verdict.splits) == 7
    assert verdict.best.samples_per_s == max(split.samples_per_s for split in verdict.splits)
    ranks = verdict.best.deployment
    assert ranks.attention_ranks + ranks.expert_ranks == 8


def test_split_that_does_not_fit_gives_its_reason_and_is_skipped() -> None:
    verdict = search(workload(), best)
    last = verdict.splits[-1]
    assert last.planned is None
    assert "expert_ranks" in last.problem
    assert "would fit" in last.problem


def test_samples_per_second_include_all_attention_ranks() -> None:
    for split in search(workload(), best).splits:
        if split.planned is not None:
            ranks = split.deployment.attention_ranks
            whole = ranks * split.planned.samples / split.planned.makespan_ms * 1e3
            assert split.samples_per_s == pytest.approx(whole)


def test_advice_names_a_slow_link() -> None:
    verdict = search(workload(with_link(1e-5), tokens=256), best)
    assert not verdict.disaggregate
    assert "Do not disaggregate here" in verdict.advice
    assert "links" in verdict.advice


def test_advice_is_to_split_if_only_a_split_fits() -> None:
    """Without a split each device holds attention and a share of the experts."""
    model = shape(DEEPSEEK_V2, num_hidden_layers=12, moe_intermediate_size=2048)
    small = Workload(model, H200, 8, 512, 0, 18.0 * GIB)
    verdict = search(small, best)
    assert [other.samples_per_s for other in alternatives(small)] == [0.0, 0.0]
    assert verdict.disaggregate
    assert verdict.advice.startswith("Disaggregate")


def test_advice_follows_the_rates() -> None:
    for hardware in (H200, with_link(1e-7), with_link(1e-5)):
        verdict = search(workload(hardware), best)
        rival = max(other.samples_per_s for other in verdict.others)
        assert verdict.disaggregate == (verdict.best.samples_per_s > rival)


def test_no_resource_is_busy_beyond_the_makespan() -> None:
    for split in search(workload(), best).splits:
        if split.planned is not None:
            assert all(0 < part <= 1 + 1e-9 for part in busy_fractions(split).values())


def test_alternatives_have_the_volumes_of_table_1() -> None:
    """On links so slow that nothing else counts. All-gather: (N-1)/N of a layer's weights. Two
    all-to-alls: of a device's tokens, a copy for each of the other devices that has work for it."""
    per_byte, devices, tokens = 1.0, 8, 64
    model = shape(QWEN3_235B)
    slow = workload(with_link(per_byte), tokens=tokens)._replace(max_samples=1)
    exchange, gather = alternatives(slow)
    layer_bytes = 128 * 3 * 4096 * 1536 * 2
    assert gather.makespan_ms == pytest.approx(93 * layer_bytes * 7 / 8 * per_byte, rel=1e-3)
    missed = 1.0
    for chosen in range(8):
        missed *= (128 - 16 - chosen) / (128 - chosen)
    rows = tokens * (devices - 1) * (1 - missed)
    pairs = tokens * 8 * 7 / 8
    exchanged = 94 * (2 * rows * 4096 * 2 + 8 * pairs) * per_byte
    assert exchange.makespan_ms == pytest.approx(exchanged, rel=1e-3)
    assert model.moe_layers == 94


def test_devices_too_small_for_any_split_are_rejected() -> None:
    with pytest.raises(ResourceError, match=r"devices=8: no split fits; 1 \+ 7"):
        search(workload(usable_gib=20.0), best)
