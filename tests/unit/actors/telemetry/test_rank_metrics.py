"""Metrics of a rank, updated directly or read at each scrape."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry.rank_metrics import RankMetrics
from actors.telemetry.telemetry import Telemetry
from actors.telemetry.timeline import Timeline
from contracts.metrics import STAGE
from contracts.ranks import Group, RankSpec
from contracts.traces import Stage, TaskSpan


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made(time: Time) -> RankMetrics:
    spec = RankSpec(
        group=Group.EXPERT,
        rank=1,
        attention_ranks=1,
        expert_ranks=2,
        model_folder="m",
        token=b"",
        epoch=3,
        device="cpu",
        backend="shm",
    )
    return RankMetrics(spec, time)


def value(metrics: RankMetrics, name: str) -> float:
    families = text_string_to_metric_families(metrics.exposition())
    (found,) = [s.value for family in families for s in family.samples if s.name == name]
    return float(found)


def test_busy_fraction_covers_time_since_last_scrape() -> None:
    time = Time()
    metrics = made(time)
    timeline = Timeline(10, metrics.span)
    metrics.attach(timeline, lambda: (0, 0))
    for busy_s, expected in ((0.5, 0.25), (2.0, 1.0), (0.0, 0.0)):
        timeline.add(TaskSpan("expert-1", Stage.EXPERT, time.now_s, time.now_s + busy_s))
        timeline.add(TaskSpan("expert-1", Stage.WAIT, time.now_s, time.now_s + 1.0))
        time.now_s += 2.0
        assert value(metrics, "tandem_rank_busy_fraction") == pytest.approx(expected)
    assert value(metrics, "tandem_rank_busy_fraction") == 0.0  # no time has passed
    assert value(metrics, "tandem_stage_seconds_sum") == pytest.approx(2.5)


def test_bytes_sent_do_not_depend_on_number_of_scrapes() -> None:
    metrics, sent = made(Time()), [0]
    metrics.attach(Timeline(0), lambda: (sent[0], 7))
    for sent[0] in (10, 10, 35):
        assert value(metrics, "tandem_channel_bytes_total") == sent[0]


def test_blocks_and_epoch_are_read_at_scrape() -> None:
    metrics, counts = made(Time()), {"free": 4, "used": 0}
    metrics.read_blocks(lambda: counts)
    assert value(metrics, "tandem_group_epoch") == 3
    counts.update(free=1, used=3)
    samples = [
        (s.labels["state"], s.value)
        for family in text_string_to_metric_families(metrics.exposition())
        for s in family.samples
        if s.name == "tandem_kv_blocks"
    ]
    assert dict(samples) == counts


def shown(telemetry: Telemetry) -> dict[str, float]:
    """Every series."""
    lines = [line for line in telemetry.exposition().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@given(
    st.lists(
        st.lists(st.sampled_from((0.0, 1e-5, 2e-5, 0.1, 0.3, 1.0, 5.0)), min_size=1), min_size=1
    )
)
def test_buffered_observations_equal_direct_ones(scrapes: list[list[float]]) -> None:
    """In the buckets' bounds and beyond them, however often somebody asks between, and however many
    there are."""
    noted, observed = Telemetry(), Telemetry()
    note = noted.buffered_observer(STAGE, "expert", "expert-1")
    for values in scrapes:
        with patch("actors.telemetry.telemetry.MAX_BUFFERED", 3):
            for value in values:
                note(value)
                observed.observe(STAGE, "expert", "expert-1", value=value)
        found, wanted = shown(noted), shown(observed)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted), "sums are added up in another order"
