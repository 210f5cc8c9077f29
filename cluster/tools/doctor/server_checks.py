"""Checks of a running server for `tandem doctor --url`."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.fleet.targets_file import read_targets
from cluster.http.response_types import Status
from cluster.observe.operator_client import busy_seconds, fetch_status
from cluster.observe.server_client import Server, bearer, get_monitored, read_answer
from cluster.tools.doctor.findings import Finding
from contracts import metrics
from contracts.errors import ConfigError
from contracts.import_path import version
from contracts.ranks import RankStatus

EXPORTER_TIMEOUT_S: Final = 5.0
MAX_CONCURRENT, MAX_TARGETS = 8, 512  # exporters that are scraped
MAX_EXPOSITION_BYTES: Final = 8 << 20
SAMPLE_INTERVAL_S: Final = 2.0  # between the two samples of the server's status
REQUEST_TIMEOUT_S: Final = 10.0
MAX_BYTES: Final = 32 << 20
BUSY_FRACTION: Final = 0.95
MAX_PREDICTION_ERROR: Final = 0.3  # fraction of the measured time
_SERIES: Final = b"tandem_"
NO_LIST: Final = (
    "not checked: no list of them on this machine (metrics.exporters=false, or the launcher is on "
    "another one; --set serve.name=NAME, metrics.targets=FOLDER)"
)

MetricSamples = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, labels) -> value


def check_exporters(path: Path | None, ranks: Iterable[str], key: str | None) -> Finding:
    """Scrape every exporter on the list that Prometheus discovers.

    path: the list; None: no list exists here. ranks: names that should be on it.
    """
    if path is None:
        return Finding("exporters", "ok", NO_LIST)
    try:
        listed = read_targets(path)
    except ConfigError as error:
        return Finding("exporters", "error", error.message, "remove it, and restart the server")
    named = {one.rank for one in listed}
    endpoints = [(one.rank, url) for one in listed for url in one.urls][:MAX_TARGETS]
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        problems = list(threads.map(lambda each: _problem(each[1], key), endpoints))
    failures = [f"{rank}: {why}" for (rank, _), why in zip(endpoints, problems, strict=True) if why]
    failures += [f"{rank}: not on the list" for rank in ranks if rank not in named]
    if failures:
        advice = "Prometheus on this machine lacks their series: see exporter_failed in the logs"
        if any("401" in why for why in problems):
            advice = "give http.metrics_key of the configuration as --api-key, and to Prometheus"
        return Finding("exporters", "warning", f"{path.name}: {'; '.join(failures)}", advice)
    return Finding("exporters", "ok", f"{path.name}: {len(listed)} processes, all answer")


def _problem(url: str, key: str | None) -> str:
    """Return why an exporter cannot be scraped, or an empty string."""
    end_s = time.monotonic() + EXPORTER_TIMEOUT_S
    try:
        with httpx.stream(
            *("GET", url), headers=bearer(key), timeout=EXPORTER_TIMEOUT_S, trust_env=False
        ) as response:
            if response.status_code != 200:
                return f"answers {response.status_code}"
            body = read_answer(response, MAX_EXPOSITION_BYTES, end_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return "" if _SERIES in body else "does not answer as Tandem does"


class ServerSnapshot(NamedTuple):
    """Two samples of a server's status. scraped: None where not_scraped names the reason."""

    before: Status
    status: Status
    scraped: MetricSamples | None = None
    not_scraped: str = ""

    def earlier(self, name: str) -> RankStatus | None:
        return next((rank for rank in self.before.ranks if rank.name == name), None)


def check_server(server: Server, targets: Path | None) -> list[Finding]:
    """Run all checks in order; only the first if the server does not answer.

    targets: the list of exporters for Prometheus; None: no list exists here.
    """
    try:
        before = fetch_status(server)
        time.sleep(SAMPLE_INTERVAL_S)
        snapshot = ServerSnapshot(before, fetch_status(server))
    except ConfigError as error:
        advice = "is it running there (tandem serve), and is this its key (--api-key)?"
        return [Finding("reached", "error", error.message, advice)]
    try:
        snapshot = snapshot._replace(scraped=_scrape(server))
    except ConfigError as error:
        snapshot = snapshot._replace(not_scraped=error.message)
    ranks = [one.name for one in snapshot.status.ranks if one.healthy]
    return [*findings_of(snapshot), check_exporters(targets, ranks, server.key)]


def findings_of(snapshot: ServerSnapshot) -> list[Finding]:
    checks = (_reached, _version, _ranks, _load, _planner, _metrics, _keys)
    return [check(snapshot) for check in checks]


def _scrape(server: Server) -> MetricSamples:
    status, body = get_monitored(
        server, "/metrics", most_bytes=MAX_BYTES, timeout_s=REQUEST_TIMEOUT_S
    )
    if status != 200:
        raise ConfigError(f"/metrics answered {status}")
    try:
        families = text_string_to_metric_families(body.decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }
    except ValueError as error:
        raise ConfigError(f"/metrics: {error}") from None


def _reached(snapshot: ServerSnapshot) -> Finding:
    status = snapshot.status
    if status.problems:
        advice = "it refuses requests (503): see its log folder"
        return Finding("reached", "error", "; ".join(status.problems), advice)
    return Finding("reached", "ok", f"{status.model}, {len(status.ranks)} ranks, ready")


def _version(snapshot: ServerSnapshot) -> Finding:
    ours, theirs = version(), snapshot.status.version
    if ours != theirs:
        advice = "its answers may have other fields: use the same version here"
        return Finding("version", "warning", f"the server's {theirs}, ours {ours}", advice)
    return Finding("version", "ok", theirs)


def _ranks(snapshot: ServerSnapshot) -> Finding:
    ranks = snapshot.status.ranks
    lost = [f"{one.name}: {one.reason or 'not healthy'}" for one in ranks if not one.healthy]
    if lost:
        advice = "see rank_failed and worker_replaced in the logs"
        return Finding("ranks", "error", "; ".join(lost), advice)
    if not ranks:
        return Finding("ranks", "error", "none has reported its state", "see the log of `groups`")
    restarted = [
        one.name
        for one in ranks
        if (before := snapshot.earlier(one.name)) and one.uptime_s < before.uptime_s
    ]
    if restarted:
        advice = "see worker_replaced and rank_failed in the logs"
        return Finding("ranks", "warning", f"just restarted: {', '.join(restarted)}", advice)
    return Finding("ranks", "ok", ", ".join(one.name for one in ranks))


def _load(snapshot: ServerSnapshot) -> Finding:
    pipelines = snapshot.status.pipelines.values()
    waiting = sum(sum(load.waiting.values()) for load in pipelines)
    requests = sum(load.requests for load in pipelines)
    found = f"{requests} requests in progress, {waiting} sequences wait"
    full = [f"{name} {part:.0%}" for name, part in _busy(snapshot) if part > BUSY_FRACTION]
    if full and waiting:
        advice = "at its limit: `tandem plan` computes what one more rank would add"
        return Finding("load", "warning", f"{found}; busy: {', '.join(full)}", advice)
    return Finding("load", "ok", found)


def _busy(snapshot: ServerSnapshot) -> Iterator[tuple[str, float]]:
    """Yield the fraction of the time between both samples in which each rank computed."""
    for rank in snapshot.status.ranks:
        before = snapshot.earlier(rank.name)
        if before is not None and before.uptime_s < rank.uptime_s:
            spent_s = busy_seconds(rank) - busy_seconds(before)
            yield rank.name, max(0.0, spent_s / (rank.uptime_s - before.uptime_s))


def _planner(snapshot: ServerSnapshot) -> Finding:
    notes = {
        one.name: one.notes["planner"] for one in snapshot.status.ranks if "planner" in one.notes
    }
    without = {name: note for name, note in notes.items() if note != "ready"}
    if without:
        found = "; ".join(f"{name}: {note}" for name, note in without.items())
        advice = "batches run by the section `schedule`: see planner_state in the ranks' logs"
        return Finding("planner", "warning", found, advice)
    scraped = snapshot.scraped or {}
    predicted_s = scraped.get((metrics.PLAN_PREDICTED.name, ()))
    measured_s = scraped.get((metrics.PLAN_MEASURED.name, ()))
    if predicted_s is None or not measured_s:
        return Finding("planner", "ok", "no batch has been predicted and measured yet")
    error = predicted_s / measured_s - 1
    found = (
        f"{1e3 * predicted_s:.2f} ms predicted, {1e3 * measured_s:.2f} ms measured ({error:+.0%})"
    )
    if abs(error) > MAX_PREDICTION_ERROR:
        advice = "if more batches differ as much: `tandem profile`, or planner.refit=true"
        return Finding("planner", "warning", found, advice)
    return Finding("planner", "ok", f"the latest batch: {found}")


def _metrics(snapshot: ServerSnapshot) -> Finding:
    if snapshot.scraped is None:
        advice = "Prometheus cannot scrape it either: see the ingress's log"
        return Finding("metrics", "error", snapshot.not_scraped, advice)
    present = {dict(labels).get("rank") for _, labels in snapshot.scraped}
    silent = [one.name for one in snapshot.status.ranks if one.healthy and one.name not in present]
    if silent:
        advice = "their series are missing on every board: see rank_metrics_failed in the log"
        return Finding("metrics", "warning", f"no series of {', '.join(silent)}", advice)
    return Finding("metrics", "ok", f"{len(snapshot.scraped):,} series, of every rank")


def _keys(snapshot: ServerSnapshot) -> Finding:
    """Report whether the server rejected a changed file of keys."""
    name, scraped = metrics.KEYS_RELOADED.name, snapshot.scraped or {}
    rejected = scraped.get((name, (("outcome", "rejected"),)), 0.0)
    loaded = scraped.get((name, (("outcome", "loaded"),)), 0.0)
    found = f"changed files: {loaded:g} loaded, {rejected:g} rejected since the start"
    if rejected:
        advice = (
            "the old keys stay until the file is valid: see api_keys_rejected in the ingress's log"
        )
        return Finding("keys", "warning", found, advice)
    return Finding("keys", "ok", found)
