"""HTTP server for the metrics of one process."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry import exporter
from actors.telemetry.chrome_trace import write_chrome_trace
from actors.telemetry.exporter import MAX_CONNECTIONS, SETTLE_S, Exporter, ScrapeKey
from actors.telemetry.telemetry import RankMetrics, Recorded, SpanGroup, Telemetry, Timeline
from contracts import metrics
from contracts.config import HttpConfig
from contracts.metrics import STAGE
from contracts.ranks import Group
from contracts.traces import Stage, TaskSpan
from tests.support.manual_clock import ManualClock
from tests.support.rank_specs import rank_spec
from tests.support.spans import busy_seconds, exposed_communication

OPEN_METRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
DEADLINE_S = 20.0


class Exporting:
    """A process with metrics. address: "host:port/path"."""

    def __init__(self, key: str | None = None) -> None:
        self.telemetry = Telemetry()
        self.exporter = Exporter(self.telemetry, key=key, name="attention-0")
        self.address = self.exporter.open("127.0.0.1")

    def get(self, path: str | None = None, **headers: str) -> httpx.Response:
        where = self.address if path is None else self.address.partition("/")[0] + path
        return httpx.get(f"http://{where}", headers=headers, timeout=DEADLINE_S)

    def connect(self) -> socket.socket:
        host, _, port = self.address.partition("/")[0].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


@pytest.fixture
def exporting() -> Iterator[Exporting]:
    made = Exporting()
    yield made
    made.exporter.close()


def test_scrape_contains_all_metrics(exporting: Exporting) -> None:
    exporting.telemetry.count(metrics.PREEMPTIONS, by=3)
    answer = exporting.get()
    (family,) = text_string_to_metric_families(answer.text)
    assert [sample.value for sample in family.samples] == [3.0]
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert exporting.get("/metrics?name[]=tandem").text == answer.text


def test_openmetrics_is_served_on_request_with_an_exemplar_per_bucket(exporting: Exporting) -> None:
    for value, request_id in ((0.02, "req-a"), (0.2, "req-b" * 100)):
        labels = "generation", "ls"
        exporting.telemetry.observe(metrics.TTFT, *labels, value=value, request_id=request_id)
    answer = exporting.get(**OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    (family,) = open_metrics_families(answer.text)
    exemplars = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar is not None}
    assert [e.labels["request_id"][:5] for e in exemplars.values()] == ["req-a", "req-b"]
    assert [e.value for e in exemplars.values()] == [0.02, 0.2]
    assert "req-a" not in exporting.get().text


def test_path_of_another_process_is_not_found(exporting: Exporting) -> None:
    """A process may get a port that Prometheus still scrapes for another one."""
    other = Exporting()
    try:
        path = "/" + other.address.partition("/")[2]
        assert other.get(path).status_code == 200
        assert exporting.get(path).status_code == 404
    finally:
        other.exporter.close()
    with pytest.raises(httpx.ConnectError):
        other.get()


def test_request_without_the_bearer_token_is_unauthorized() -> None:
    guarded = Exporting(key="secret")
    try:
        guarded.telemetry.count(metrics.PREEMPTIONS)
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}):
            answer = guarded.get(**given)
            assert (answer.status_code, "tandem_" in answer.text) == (401, False)
        assert guarded.get(Authorization="Bearer secret").status_code == 200
        assert guarded.get(Authorization="bearer  secret").status_code == 200
    finally:
        guarded.exporter.close()


@pytest.mark.parametrize(
    "sent",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" + b"\0" * 64, b"a" * (1 << 17)],
    ids=["nothing", "no path", "TLS", "too long"],
)
def test_client_without_http_is_disconnected_and_others_are_served(
    exporting: Exporting, sent: bytes
) -> None:
    with exporting.connect() as strange:
        with contextlib.suppress(OSError):  # the server may close before it has read all of it
            strange.sendall(sent)
            strange.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while strange.recv(1 << 16):
                pass
    assert exporting.get().status_code == 200


def test_slow_scrapers_are_disconnected_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch, exporting: Exporting
) -> None:
    monkeypatch.setattr(exporter, "DEADLINE_S", 0.2)
    slow = [exporting.connect() for _ in range(MAX_CONNECTIONS)]
    for connection in slow:
        connection.sendall(b"GET /metrics HT")
    assert exporting.get().status_code == 200
    for connection in slow:
        assert connection.recv(1) == b""
        connection.close()


def test_metrics_of_a_loop_are_collected_in_that_loop() -> None:
    async def scrape() -> tuple[str, list[int]]:
        telemetry, threads = Telemetry(), list[int]()

        def solve_s() -> float:
            threads.append(threading.get_ident())
            return 7.0

        telemetry.read(metrics.PLAN_SOLVE, of=solve_s)
        loop = asyncio.get_running_loop()
        exporter = Exporter(telemetry, key=None, name="ingress-1", loop=loop)
        address = exporter.open("127.0.0.1")
        answer = await asyncio.to_thread(httpx.get, f"http://{address}", timeout=DEADLINE_S)
        await asyncio.to_thread(exporter.close)
        return answer.text, threads

    text, threads = asyncio.run(scrape())
    assert "tandem_plan_solve_seconds 7.0" in text
    assert set(threads) == {threading.get_ident()}


def test_unavailable_port_is_logged_and_does_not_stop_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Exporter(Telemetry(), key=None, name="expert-1")
    with caplog.at_level(logging.WARNING, "tandem.metrics"):
        assert broken.open("192.0.2.1") == ""  # documentation address, on no machine
    broken.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("exporter_failed name=expert-1 host=192.0.2.1 reason=")


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["api_keys: [sk-secret]", *lines]))
    return path


def followed(path: Path, time: ManualClock, configured: str | None = None) -> ScrapeKey:
    return ScrapeKey(HttpConfig(keys_file=str(path), metrics_key=configured), time)


@pytest.mark.parametrize(("configured", "needed"), [(None, None), ("configured", "configured")])
def test_configured_key_applies_without_a_key_in_the_file(
    tmp_path: Path, configured: str | None, needed: str | None
) -> None:
    assert ScrapeKey(HttpConfig(metrics_key=configured))() == needed
    assert followed(written(tmp_path / "keys"), ManualClock(), configured)() == needed
    assert followed(tmp_path / "on another machine", ManualClock(), configured)() == needed


def test_key_of_the_file_takes_precedence_and_changes_after_settling(tmp_path: Path) -> None:
    time, path = ManualClock(), written(tmp_path / "keys", "metrics_key: first")
    key = followed(path, time, "configured")
    assert key() == "first"
    written(path, "metrics_key: second")
    assert key() == "first"
    time.advance(SETTLE_S)
    assert key() == "second"


@pytest.mark.parametrize("damage", ["gone", "no keys"])
def test_invalid_file_keeps_the_key(tmp_path: Path, damage: str) -> None:
    time, path = ManualClock(), written(tmp_path / "keys", "metrics_key: first")
    key = followed(path, time)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("api_keys: []")
    for _ in range(3):
        time.advance(SETTLE_S)
        assert key() == "first"


def made(time: ManualClock) -> RankMetrics:
    return RankMetrics(rank_spec(Group.EXPERT, rank=1, expert_ranks=2, epoch=3), time)


def value(metrics: RankMetrics, name: str) -> float:
    families = text_string_to_metric_families(metrics.exposition())
    (found,) = [s.value for family in families for s in family.samples if s.name == name]
    return float(found)


def test_busy_fraction_covers_time_since_last_scrape() -> None:
    time = ManualClock()
    metrics = made(time)
    timeline = Timeline(10, metrics.span)
    metrics.attach(timeline, lambda: (0, 0))
    for busy_s, expected in ((0.5, 0.25), (2.0, 1.0), (0.0, 0.0)):
        timeline.add(TaskSpan("expert-1", Stage.EXPERT, time(), time() + busy_s))
        timeline.add(TaskSpan("expert-1", Stage.WAIT, time(), time() + 1.0))
        time.advance(2.0)
        assert value(metrics, "tandem_rank_busy_fraction") == pytest.approx(expected)
    assert value(metrics, "tandem_rank_busy_fraction") == 0.0  # no time has passed
    assert value(metrics, "tandem_stage_seconds_sum") == pytest.approx(2.5)


def test_totals_that_are_read_at_each_scrape_are_not_added_up() -> None:
    time = ManualClock()
    metrics, timeline = made(time), Timeline(10, lambda _: None)
    metrics.attach(timeline, lambda: (7, 0))
    timeline.exposed_s = 2.0
    for _ in range(3):
        assert value(metrics, "tandem_exposed_communication_seconds_total") == 2.0
        assert value(metrics, "tandem_channel_bytes_total") == 7.0


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
    """Values inside and beyond the bounds, with reads in between."""
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


def span(stage: Stage, start_s: float, end_s: float, resource: str = "attention-0") -> TaskSpan:
    return TaskSpan(resource, stage, start_s, end_s, 3, 1, 2, 0, 40)


intervals = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1]))
stages = st.sampled_from(
    [Stage.ATTENTION, Stage.SHARED, Stage.EXPERT, Stage.FINISH, Stage.A2E, Stage.E2A]
)


@given(st.lists(st.tuples(stages, intervals), max_size=15))
def test_exposed_time_equals_count_by_second(drawn: list[tuple[Stage, tuple[int, int]]]) -> None:
    spans = [span(stage, float(start), float(end)) for stage, (start, end) in drawn]
    moving = (Stage.A2E, Stage.E2A)

    def covered(second: int, communicating: bool) -> bool:
        return any(
            s.start_s <= second < s.end_s for s in spans if (s.stage in moving) == communicating
        )

    expected = sum(covered(t, True) and not covered(t, False) for t in range(41))
    assert exposed_communication(spans) == pytest.approx(expected)
    busy = sum(covered(t, False) for t in range(41))
    compute = [stage for stage in Stage if stage not in moving]
    assert busy_seconds(spans, compute) == pytest.approx(busy)


def test_timeline_keeps_last_spans_and_total_seconds() -> None:
    seen: list[Recorded] = []
    timeline = Timeline(2, seen.append)
    for number in range(5):
        timeline.add(span(Stage.ATTENTION, number, number + 0.5))
    timeline.add(span(Stage.EXPERT, 9.0, 11.0))
    assert [s.start_s for s in timeline.spans()] == [4, 9.0]
    assert timeline.stage_seconds[Stage.ATTENTION] == pytest.approx(2.5)
    assert timeline.stage_seconds[Stage.EXPERT] == pytest.approx(2.0)
    assert len(seen) == 6


def test_group_of_spans_is_counted_at_once_and_made_when_it_is_read() -> None:
    made: list[list[TaskSpan]] = []

    def make() -> list[TaskSpan]:
        made.append([span(Stage.EXPERT, 1.0, 2.0), span(Stage.SEND, 2.0, 2.5)])
        return made[-1]

    metrics = RankMetrics(rank_spec(Group.EXPERT), ManualClock())
    timeline = Timeline(2, metrics.span)
    timeline.add(SpanGroup(Stage.SEND, 2.5, {Stage.EXPERT: [1.0], Stage.SEND: [0.5]}, make))
    timeline.add(span(Stage.EXPERT, 3.0, 5.0))
    assert timeline.stage_seconds[Stage.EXPERT] == pytest.approx(3.0)
    assert 'tandem_stage_seconds_count{rank="expert-0",stage="expert"} 2.0' in metrics.exposition()
    assert not made
    assert [each.start_s for each in timeline.spans()] == [1.0, 2.0, 3.0]
    assert [each.start_s for each in timeline.since("expert-0", 2.2).spans] == [2.0, 3.0]


def test_only_the_part_of_a_transfer_within_a_wait_counts_as_exposed() -> None:
    timeline = Timeline(10)
    timeline.record_wait(10.0, 20.0, [(5.0, 12.0), (11.0, 13.0), (19.0, 25.0), (1.0, 2.0)])
    assert timeline.exposed_s == pytest.approx(4.0)
    timeline.record_wait(30.0, 31.0, [])
    assert timeline.exposed_s == pytest.approx(4.0)


def test_trace_has_complete_events_for_ranks_and_pairs_for_links(tmp_path: Path) -> None:
    spans = [
        span(Stage.ATTENTION, 100.0, 100.5),
        span(Stage.WAIT, 100.5, 101.0),
        span(Stage.A2E, 100.5, 100.75, "attention-0>expert-0"),
        span(Stage.A2E, 100.6, 100.7, "attention-0>expert-0"),  # overlaps the one before
        span(Stage.E2A, 100.8, 100.9, "expert-0>attention-0"),
        span(Stage.EXPERT, 100.7, 100.8, "expert-0"),
    ]
    path = tmp_path / "trace.json"
    write_chrome_trace(spans, path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    by_phase = Counter(event["ph"] for event in events)
    assert (by_phase["X"], by_phase["b"], by_phase["e"]) == (3, 3, 3)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted({s.resource for s in spans})
    begins = {(e["cat"], e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "b"}
    ends = {(e["cat"], e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 3
    assert all(begins[key] <= ends[key] for key in begins)
    complete = {e["name"]: (e["ts"], e["dur"], names[e["tid"]]) for e in events if e["ph"] == "X"}
    ts, dur, resource = complete["expert L1 m2 g0"]
    assert (ts, dur) == (pytest.approx(0.7e6), pytest.approx(0.1e6))
    assert resource == "expert-0"
