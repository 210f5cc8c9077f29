"""A real Prometheus, with the committed configuration, beside a real cluster of both pipelines
under load: every panel and every rule has data, and its counts are the load generator's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.load.bench import Bench, BenchSettings, bench
from cluster.load.outcome import percentile
from cluster.serving.front import free_port
from cluster.serving.server import serving
from contracts import metrics
from contracts.loading import load_config
from tests.architecture.support import ROOT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(550),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed: apt-get install prometheus",
    ),
]

BOARDS = sorted((ROOT / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "dashboards" / "rules").glob("*.yml"))
CONFIG = ROOT / "dashboards" / "prometheus.yml"
NAME = f"prom-{os.getpid()}"
DEADLINE_S = 90.0
WINDOW = "30s"  # Grafana's, at least four scrapes
ROWS = 12  # requests of as many rows
# What one cluster cannot have besides the rest, and what sets it.
ABSENT = {
    metrics.LOCAL_ACTIVATION.name: "prefill.experts=all_to_all, where nothing is gathered",
    metrics.BULK_ROWS.name: "a bulk job",
    metrics.BULK_EXPECTED_ROWS.name: "a bulk job",
    metrics.KEYS_READ.name: "http.keys_file",
}


class Prometheus:
    """With the cluster's series alone, whatever else runs on this machine."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        for name, value in (("cluster", NAME), ("group", ".*"), ("rank", ".*")):
            expression = expression.replace(f"${name}", value)
        expression = expression.replace("$__rate_interval", WINDOW)
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expression: str) -> float:
        """0 where there is no such series."""
        return sum(float(one["value"][1]) for one in self.ask(expression))

    def get(self, path: str, **parameters: str) -> Any:
        return self._client.get(path, params=parameters).json()["data"]

    def until(self, true: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < end_s, what
            time.sleep(0.5)


class Rig:
    def __init__(self, url: str, prometheus: Prometheus) -> None:
        self.url, self.prometheus = url, prometheus
        self.found: Bench = self._load()

    def _load(self) -> Bench:
        """Two classes, then rows of a classification, over several scrapes; all of it scraped."""
        settings = BenchSettings(
            url=self.url, rate=4.0, seconds=25.0, prompt_tokens=96, output_tokens=24, ls=0.5, seed=3
        )
        self._refused()
        found = bench(settings, lambda ended, of: None)
        body = {"model": "bundled", "labels": [" no", " yes"]}
        for number in range(ROWS):
            texts = [f"Row {number} {row}: It broke after two days." for row in range(16)]
            answer = httpx.post(
                f"{self.url}/v1/classify", json={**body, "input": texts}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            time.sleep(1.0)  # a bit at each scrape, for a rate wants two
        self._refused()
        rows = f'{metrics.REQUESTS.name}{{cluster="{NAME}", pipeline="prefill", outcome="ok"}}'
        self.prometheus.until(lambda: self.prometheus.value(rows) >= ROWS, "rows are not scraped")
        return found

    def _refused(self) -> None:
        assert httpx.post(f"{self.url}/v1/completions", json={}, timeout=60).status_code == 400

    def plan_something(self) -> None:
        """The planner knows nothing of this machine at first: until it has chosen a plan."""
        name = metrics.PLAN_PREDICTED.name
        body = {"model": "bundled", "max_tokens": 4}

        def is_planned() -> bool:
            for number in range(5):
                prompt = f"{time.monotonic()}" + " and so on" * (1 + number * 7)
                httpx.post(
                    f"{self.url}/v1/completions", json={**body, "prompt": prompt}, timeout=60
                )
            planned = f'{{__name__=~"{name}|{metrics.PLAN_SOLVE.name}", cluster="{NAME}"}}'
            error = f'cluster:tandem_prediction_error:ratio{{cluster="{NAME}"}}'
            return len(self.prometheus.ask(planned)) == 2 and bool(self.prometheus.ask(error))

        self.prometheus.until(is_planned, "no plan is the planner's")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    patch = pytest.MonkeyPatch()
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    config = load_config(
        None,
        [
            "model.name=bundled",
            f"serve.name={NAME}",
            "groups.prefill_ranks=2",
            "prefill.experts=gathered",
            "placement.follow=follow",
            "experts.slots=32",
            "kv.pool_tokens=16384",
            "groups.ready_timeout_s=150",
            f"http.port={free_port()}",
        ],
    )
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        url = stack.enter_context(_prometheus(tmp_path_factory.mktemp("prometheus")))
        served = stack.enter_context(serving(config))
        prometheus = Prometheus(url)
        ranks = f'up{{cluster="{NAME}"}} == 1'
        prometheus.until(lambda: len(prometheus.ask(ranks)) == 7, "not all are scraped")
        yield Rig(served.url, prometheus)


@contextlib.contextmanager
def _prometheus(folder: Path) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={CONFIG}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_requests_and_tokens_are_the_load_generators_exactly(rig: Rig) -> None:
    ask, found = rig.prometheus, rig.found
    of = f'cluster="{NAME}", group="ingress"'
    requests = f'sum({metrics.REQUESTS.name}{{{of}, pipeline="generation", outcome="ok"}})'
    tokens = f"sum({metrics.GENERATED_TOKENS.name}{{{of}}})"
    rows = f'{metrics.REQUESTS.name}{{{of}, pipeline="prefill", outcome="ok"}}'
    ask.until(lambda: ask.value(requests) >= found.all.answered, "requests are missing")
    assert found.all.answered > found.all.requests / 2  # a busy machine refuses some
    assert ask.value(requests) == found.all.answered
    refused = f'sum({metrics.REQUESTS.name}{{{of}, pipeline="generation", outcome="overload"}})'
    assert ask.value(refused) == found.all.errors.get("429", 0)
    assert ask.value(tokens) == sum(one.tokens for one in found.outcomes if not one.error)
    assert ask.value(rows) == ROWS


def test_the_median_ttft_is_within_a_bucket_of_the_load_generators(rig: Rig) -> None:
    """Theirs counts from when a request was due, and has the way there and back."""
    name = f'{metrics.TTFT.name}_bucket{{cluster="{NAME}", pipeline="generation"}}'
    counts = {
        float(one["metric"]["le"]): float(one["value"][1])
        for one in rig.prometheus.ask(f"sum by (le) ({name})")
    }
    bounds = sorted(counts)
    seen_s = percentile([one.ttft_s for one in rig.found.outcomes if not one.error], 0.5)
    ours = next(i for i, le in enumerate(bounds) if counts[le] >= counts[bounds[-1]] / 2)
    theirs = next(i for i, le in enumerate(bounds) if seen_s <= le)
    assert abs(ours - theirs) <= 1


def test_every_panel_has_data(rig: Rig) -> None:
    assert BOARDS
    rig.plan_something()
    empty = {
        expression
        for board in BOARDS
        for expression in _expressions(json.loads(board.read_text()))
        if not rig.prometheus.ask(expression)
    }
    unexpected = {e for e in empty if not any(name in e for name in ABSENT)}
    assert not unexpected, "\n".join(sorted(unexpected))


def test_every_rule_is_evaluated_without_an_error(rig: Rig) -> None:
    assert RULES
    rules = [
        rule for group in rig.prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]
    ]
    declared = [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) == len(declared)
    assert {rule["health"] for rule in rules} == {"ok"}
    recorded = [rule["record"] for rule in declared if "record" in rule]
    empty = {name for name in recorded if not rig.prometheus.ask(f'{name}{{cluster="{NAME}"}}')}
    unexpected = {e for e in empty if not any(name in e for name in ABSENT)}
    assert not unexpected, "\n".join(sorted(unexpected))


def test_latencies_name_requests(rig: Rig) -> None:
    query = f'{metrics.TTFT.name}_bucket{{cluster="{NAME}"}}'
    now_s = time.time()
    found = rig.prometheus.get(
        "/api/v1/query_exemplars", query=query, start=str(now_s - 300), end=str(now_s)
    )
    ids = {each["labels"]["request_id"] for series in found for each in series["exemplars"]}
    assert ids


def test_every_series_says_where_it_is_from_and_no_process_has_over_500(rig: Rig) -> None:
    of = f'{{cluster="{NAME}", __name__=~"tandem_.+"}}'
    for one in rig.prometheus.ask(f"count by (group, node) ({of})"):
        assert one["metric"].keys() == {"group", "node"}
    per_process = rig.prometheus.ask(f"count by (instance) ({of})")
    assert len(per_process) >= 6
    assert max(float(one["value"][1]) for one in per_process) <= 500


def _expressions(board: Any) -> Iterator[str]:
    """Of all panels, those in rows too."""
    if isinstance(board, dict):
        if isinstance(board.get("expr"), str):
            yield board["expr"]
        for value in board.values():
            yield from _expressions(value)
    elif isinstance(board, list):
        for value in board:
            yield from _expressions(value)
