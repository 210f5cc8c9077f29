"""Metrics: declaration, exposition and merging."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry.telemetry import Telemetry, merge_expositions
from contracts import metrics
from contracts.metrics import Metric, MetricKind


def used(telemetry: Telemetry, metric: Metric) -> None:
    labels = [f"{name}-value" for name in metric.labels]
    if metric.kind is MetricKind.COUNTER:
        telemetry.count(metric, *labels)
    elif metric.kind is MetricKind.GAUGE:
        telemetry.set(metric, *labels, to=1.0)
    else:
        telemetry.observe(metric, *labels, value=0.1)


@pytest.mark.parametrize("metric", metrics.ALL, ids=lambda metric: metric.name)
def test_metrics_are_exposed_with_declared_names_and_labels(metric: Metric) -> None:
    telemetry = Telemetry()
    used(telemetry, metric)
    (family,) = text_string_to_metric_families(telemetry.exposition())
    shown = family.name + ("_total" if metric.kind is MetricKind.COUNTER else "")
    assert shown == metric.name
    assert family.documentation == metric.help
    assert set(family.samples[0].labels) - {"le"} == set(metric.labels)


def test_metric_names_are_unique_and_counters_end_in_total() -> None:
    names = [metric.name for metric in metrics.ALL]
    assert len(set(names)) == len(names)
    for metric in metrics.ALL:
        assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)


def test_unused_metric_is_not_exposed() -> None:
    telemetry = Telemetry()
    used(telemetry, metrics.TPOT)
    assert "tandem_requests_total" not in telemetry.exposition()


def test_merged_expositions_declare_each_family_once_and_keep_every_sample() -> None:
    telemetries = [Telemetry() for _ in range(3)]
    for rank, telemetry in enumerate(telemetries):
        telemetry.set(metrics.KV_BLOCKS, f"attention-{rank}", "free", to=rank)
        telemetry.observe(metrics.STAGE, "attention", f"attention-{rank}", value=0.01)
    merged = merge_expositions([telemetry.exposition() for telemetry in telemetries])
    families = list(text_string_to_metric_families(merged))
    assert [family.name for family in families] == ["tandem_kv_blocks", "tandem_stage_seconds"]
    assert [sample.value for sample in families[0].samples] == [0.0, 1.0, 2.0]
    assert merged.count("# TYPE") == merged.count("# HELP") == 2


def test_telemetries_in_one_process_are_independent() -> None:
    one, other = Telemetry(), Telemetry()
    one.count(metrics.PREEMPTIONS, by=3)
    other.count(metrics.PREEMPTIONS)
    assert "tandem_preemptions_total 3.0" in one.exposition()
    assert "tandem_preemptions_total 1.0" in other.exposition()


def test_merge_sums_counters_and_keeps_largest_gauge() -> None:
    one, other = Telemetry(), Telemetry()
    for telemetry, sent, epoch in ((one, 3, 1), (other, 4, 2)):
        telemetry.count(metrics.CHANNEL_BYTES, "a2e", "shm", by=sent)
        telemetry.set(metrics.GROUP_EPOCH, "attention_expert", to=epoch)
    merged = merge_expositions([one.exposition(), other.exposition()])
    values = [s.value for family in text_string_to_metric_families(merged) for s in family.samples]
    assert values == [7.0, 2.0]
