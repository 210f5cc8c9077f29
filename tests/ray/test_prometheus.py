"""A real Prometheus scrapes both pipelines under load.

Every panel and every rule has data, and counts equal the load generator's.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import yaml

from cluster.serving.server import serving
from cluster.tools.bench.bench import Bench, bench
from cluster.tools.bench.load_generator import BenchSettings
from cluster.tools.bench.workload import percentile
from contracts import metrics
from contracts.loading import load_config
from dashboards.panels import Board
from tests.architecture.support import ROOT
from tests.architecture.test_dashboards import expressions
from tests.support.prometheus import Prometheus, is_installed
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(550),
    pytest.mark.skipif(
        not is_installed(), reason="prometheus is not installed: apt-get install prometheus"
    ),
]

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
    metrics.KEYS_RELOADED.name: "http.keys_file",
}


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
        until(lambda: self.prometheus.sum(rows) >= ROWS, "rows are not scraped")
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
            return len(self.prometheus.now(planned)) == 2 and bool(self.prometheus.now(error))

        until(is_planned, "no plan is the planner's")


@pytest.fixture(scope="module")
def rig(app_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    config = load_config(
        None,
        [
            *app_settings,
            "model.name=bundled",
            f"serve.name={NAME}",
            "groups.prefill_ranks=2",
            "prefill.experts=gathered",
            "placement.rebalance=continuous",
            "experts.slots=32",
            "kv.pool_tokens=16384",
            "groups.ready_timeout_s=150",
        ],
    )
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = stack.enter_context(Prometheus(folder, CONFIG, cluster=NAME, window=WINDOW))
        served = stack.enter_context(serving(config))
        ranks = f'up{{cluster="{NAME}"}} == 1'
        until(lambda: len(prometheus.now(ranks)) == 7, "not all are scraped")
        yield Rig(served.url, prometheus)


def test_requests_and_tokens_equal_the_load_generators(rig: Rig) -> None:
    sum_of, found = rig.prometheus.sum, rig.found
    of = f'cluster="{NAME}", group="ingress"'
    requests = f'sum({metrics.REQUESTS.name}{{{of}, pipeline="generation", outcome="ok"}})'
    tokens = f"sum({metrics.GENERATED_TOKENS.name}{{{of}}})"
    rows = f'{metrics.REQUESTS.name}{{{of}, pipeline="prefill", outcome="ok"}}'
    until(lambda: sum_of(requests) >= found.all.completed, "requests are missing")
    assert found.all.completed > found.all.num_prompts / 2  # a busy machine refuses some
    assert sum_of(requests) == found.all.completed
    refused = f'sum({metrics.REQUESTS.name}{{{of}, pipeline="generation", outcome="overload"}})'
    assert sum_of(refused) == found.all.error_counts.get("429", 0)
    assert sum_of(tokens) == sum(one.tokens for one in found.outcomes if not one.error)
    assert sum_of(rows) == ROWS


def test_median_ttft_is_within_a_bucket_of_the_load_generators(rig: Rig) -> None:
    """Theirs counts from when a request was due, and has the way there and back."""
    name = f'{metrics.TTFT.name}_bucket{{cluster="{NAME}", pipeline="generation"}}'
    counts = {
        float(labels["le"]): value for labels, value in rig.prometheus.now(f"sum by (le) ({name})")
    }
    bounds = sorted(counts)
    seen_s = percentile([one.ttft_s for one in rig.found.outcomes if not one.error], 0.5)
    ours = next(i for i, le in enumerate(bounds) if counts[le] >= counts[bounds[-1]] / 2)
    theirs = next(i for i, le in enumerate(bounds) if seen_s <= le)
    assert abs(ours - theirs) <= 1


def test_every_panel_has_data(rig: Rig) -> None:
    rig.plan_something()
    empty = {
        expression
        for board in Board
        for expression in expressions(board)
        if not rig.prometheus.now(expression)
    }
    unexpected = {e for e in empty if not any(name in e for name in ABSENT)}
    assert not unexpected, "\n".join(sorted(unexpected))


def test_every_rule_evaluates_without_error(rig: Rig) -> None:
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
    empty = {name for name in recorded if not rig.prometheus.now(f'{name}{{cluster="{NAME}"}}')}
    unexpected = {e for e in empty if not any(name in e for name in ABSENT)}
    assert not unexpected, "\n".join(sorted(unexpected))


def test_latency_exemplars_name_requests(rig: Rig) -> None:
    query = f'{metrics.TTFT.name}_bucket{{cluster="{NAME}"}}'
    now_s = time.time()
    found = rig.prometheus.get(
        "/api/v1/query_exemplars", query=query, start=str(now_s - 300), end=str(now_s)
    )
    ids = {each["labels"]["request_id"] for series in found for each in series["exemplars"]}
    assert ids


def test_every_series_has_source_labels_and_at_most_500_per_process(rig: Rig) -> None:
    of = f'{{cluster="{NAME}", __name__=~"tandem_.+"}}'
    for labels, _ in rig.prometheus.now(f"count by (group, node) ({of})"):
        assert labels.keys() == {"group", "node"}
    per_process = rig.prometheus.now(f"count by (instance) ({of})")
    assert len(per_process) >= 6
    assert max(series.value for series in per_process) <= 500


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    wait_until(is_so, otherwise, DEADLINE_S)
