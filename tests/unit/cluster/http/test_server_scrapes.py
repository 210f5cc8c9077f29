"""The cost of /metrics does not depend on the number of scrapers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry.telemetry import EndedCounters, Telemetry, merge_expositions
from cluster.http.admin import MAX_PAUSE_S, SHARE, ScrapeCoalescer
from contracts import metrics
from contracts.config import HttpConfig
from contracts.metrics import Metric, MetricKind
from tests.support.api_harness import Api, serve_api
from tests.support.async_tests import run_async

COST_S = 0.01


class Loop:
    """Simulated scrapes that take COST_S of a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_started = 0
        self.running = 0
        self.go = asyncio.Event()
        self.go.set()
        self.pauses: list[float] = []
        self.scrapes = ScrapeCoalescer(self._make, lambda: self.now_s, self._sleep)

    async def _make(self) -> str:
        self.num_started += 1
        self.running += 1
        assert self.running == 1
        await self.go.wait()
        await asyncio.sleep(0)
        self.now_s += COST_S
        self.running -= 1
        return f"text {self.num_started}"

    async def _sleep(self, duration_s: float) -> None:
        self.pauses.append(duration_s)
        self.now_s += duration_s
        await asyncio.sleep(0)


@run_async
async def test_scrape_during_collection_joins_the_next_one() -> None:
    loop = Loop()
    loop.go.clear()
    first = asyncio.create_task(loop.scrapes.text())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loop.num_started == 1
    later = [asyncio.create_task(loop.scrapes.text()) for _ in range(10)]
    await asyncio.sleep(0)
    loop.go.set()
    assert await first == "text 1"
    assert await asyncio.gather(*later) == ["text 2"] * 10


@run_async
async def test_endless_scrapes_take_a_bounded_share_of_time() -> None:
    loop = Loop()
    for _ in range(20):
        await loop.scrapes.text()
    assert SHARE * (loop.now_s + loop.pauses[-1]) * 1.001 >= 20 * COST_S
    assert all(pause_s <= MAX_PAUSE_S for pause_s in loop.pauses)


@run_async
async def test_cancelled_scrape_does_not_affect_others_and_errors_reach_all() -> None:
    loop = Loop()
    loop.go.clear()
    leaves = asyncio.create_task(loop.scrapes.text())
    stays = asyncio.create_task(loop.scrapes.text())
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.sleep(0)
    loop.go.set()
    assert await stays == "text 1"

    async def fail() -> str:
        raise ConnectionError("gone")

    broken = ScrapeCoalescer(fail, lambda: 0.0, loop._sleep)
    for _ in range(2):
        answers = await asyncio.gather(broken.text(), broken.text(), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["gone", "gone"]


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Api]:
    http = HttpConfig(api_keys=["client"], metrics_key="prometheus")
    with serve_api(folder, None, http) as api:
        yield api


@pytest.mark.parametrize("path", ["/metrics", "/load", "/status"])
def test_metrics_require_metrics_key(guarded: Api, path: str) -> None:
    assert guarded.http.get(path).status_code == 401
    for key, status in (("client", 401), ("prometheus", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert guarded.http.get(path, headers=headers).status_code == status
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401
    assert guarded.http.get("/health").status_code == 200
    document = guarded.http.get("/openapi.json").json()
    assert document["paths"][path]["get"]["security"] == [{"metrics_key": []}]
    assert "metrics_key" in document["components"]["securitySchemes"]


def test_client_input_creates_no_series(guarded: Api) -> None:
    watcher = {"Authorization": "Bearer prometheus"}

    def series() -> set[str]:
        lines = guarded.http.get("/metrics", headers=watcher).text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    def send(number: int) -> None:
        headers = {"Authorization": "Bearer client", "x-request-id": f"{number}-" + "x" * 120}
        bodies = (
            {"model": "tiny", "prompt": [65], "max_tokens": 1, "cache_salt": f"{number}"},
            {"model": f"model-{number}", "prompt": "a", "user": f"user-{number}"},
            {"model": "tiny", "prompt": "a", "priority": f"class-{number}"},
            {"model": "tiny", "prompt": "a", "max_tokens": 1, "priority": number},
        )
        for body in bodies:
            guarded.http.post("/v1/completions", headers=headers, json=body)
        guarded.http.post("/v1/completions", headers={"Authorization": f"Bearer {number}"})
        guarded.http.get(f"/v1/models/{number}", headers=headers)

    for number in range(3):
        send(number)
    before = series()
    for number in range(3, 10):
        send(number)
    assert series() == before
    assert 0 < len(before) <= 500


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


def test_merge_sums_counters_and_keeps_largest_gauge() -> None:
    one, other = Telemetry(), Telemetry()
    for telemetry, sent, epoch in ((one, 3, 1), (other, 4, 2)):
        telemetry.count(metrics.CHANNEL_BYTES, "a2e", "shm", by=sent)
        telemetry.set(metrics.GROUP_EPOCH, "attention_expert", to=epoch)
    merged = merge_expositions([one.exposition(), other.exposition()])
    values = [s.value for family in text_string_to_metric_families(merged) for s in family.samples]
    assert values == [7.0, 2.0]


def _totals(ended: EndedCounters, pages: dict[str, str | None]) -> dict[str, float]:
    texts = [text for text in pages.values() if text is not None]
    merged = merge_expositions([*texts, ended.page(pages)])
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }


def test_merged_counters_do_not_fall_if_a_process_ends_or_does_not_answer() -> None:
    def page(sent: int) -> str:
        telemetry = Telemetry()
        telemetry.count(metrics.CHANNEL_BYTES, "a2e", "shm", by=sent)
        telemetry.count(metrics.DISPATCHED_TOKENS, "attention-0", by=sent)
        telemetry.set(metrics.GROUP_EPOCH, "attention_expert", to=sent)
        return telemetry.exposition()

    ended = EndedCounters(remembered=1)
    total, gauge, of_rank = (
        metrics.CHANNEL_BYTES.name,
        metrics.GROUP_EPOCH.name,
        metrics.DISPATCHED_TOKENS.name,
    )
    assert _totals(ended, {"a 1": page(3), "b 1": page(4)})[total] == 7
    no_answer = _totals(ended, {"a 1": page(5), "b 1": None})
    assert (no_answer[total], no_answer[gauge], no_answer[of_rank]) == (9, 5, 5)
    assert _totals(ended, {"a 1": page(5), "b 1": page(6)})[total] == 11, "not counted twice"
    for epoch in range(2, 5):
        replaced = _totals(ended, {"a 1": page(5), f"b {epoch}": page(1)})
        assert replaced[total] == 11 + epoch - 1
    assert _totals(ended, {})[total] == 14
    assert of_rank not in _totals(ended, {})


def test_series_of_requests_start_at_zero(folder: Path) -> None:
    with serve_api(folder) as api:
        page = api.http.get("/metrics").text
    for label in ("ls", "be"):
        where = f'{{class="{label}",pipeline="generation"}}'
        assert f"{metrics.TTFT.name}_count{where} 0.0" in page
        for outcome in ("ok", "error", "timeout"):
            where = f'{{class="{label}",outcome="{outcome}",pipeline="generation"}}'
            assert f"{metrics.REQUESTS.name}{where} 0.0" in page
