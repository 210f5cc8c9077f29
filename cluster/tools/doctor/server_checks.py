"""Of `tandem doctor --url`: whether everybody whom a Prometheus is told to scrape answers here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.fleet.targets_file import read_targets
from cluster.http.admin import version
from cluster.http.response_types import Status
from cluster.observe.server_client import Server, bearer
from cluster.observe.status_client import fetch_status
from cluster.observe.trace_client import fetch_trace, parse_note
from cluster.tools.doctor.findings import Finding
from contracts import metrics
from contracts.errors import ConfigError
from contracts.ranks import RankStatus
from contracts.traces import BUSY, TraceInfo

EXPORTER_TIMEOUT_S: Final = 5.0
MAX_CONCURRENT, MAX_TARGETS = 8, 512  # asked; more are not
MAX_EXPOSITION_BYTES: Final = 8 << 20
_SERIES: Final = b"tandem_"
NO_LIST: Final = (
    "not looked at: no list of them on this machine (metrics.exporters=false, or the launcher is "
    "on another one; --set serve.name=NAME, metrics.targets=FOLDER)"
)


def check_exporters(path: Path | None, ranks: Iterable[str], key: str | None) -> Finding:
    """path: of the list; None: there is none. ranks: names of those that should be on it."""
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
        advice = "no Prometheus on this machine gets their series: see exporter_failed in the logs"
        if any("401" in why for why in problems):
            advice = "give http.metrics_key of the configuration as --api-key, and to Prometheus"
        return Finding("exporters", "warning", f"{path.name}: {'; '.join(failures)}", advice)
    found = f"{path.name}: {len(listed)} processes, all answer"
    return Finding(
        "exporters",
        "ok",
        found if len(endpoints) < MAX_TARGETS else f"{found} of {MAX_TARGETS} asked",
    )


def _problem(url: str, key: str | None) -> str:
    """Why it is of no use to a scraper; empty: it is."""
    end_s, body = time.monotonic() + EXPORTER_TIMEOUT_S, b""
    try:
        with httpx.stream("GET", url, headers=bearer(key), timeout=EXPORTER_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                return f"answers {answer.status_code}"
            for part in answer.iter_bytes():
                body += part
                if len(body) > MAX_EXPOSITION_BYTES or time.monotonic() > end_s:
                    return f"its answer has no end after {len(body)} bytes"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return "" if _SERIES in body else "answers, but not as Tandem does"


SAMPLE_INTERVAL_S: Final = 2.0  # between two looks at what the ranks do
REQUEST_TIMEOUT_S: Final = 10.0
MAX_BYTES: Final = 32 << 20
BUSY_FRACTION: Final = 0.95
WRONG_FRACTION: Final = 0.3  # by which a prediction of the planner may be off
UNCERTAIN_MS: Final = 5.0

MetricSamples = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, labels) -> value


class ServerSnapshot(NamedTuple):
    """Two looks at a server, and what lies between them. scraped, clocks: None, and why not."""

    before: Status
    status: Status
    seconds: float
    scraped: MetricSamples | None
    clocks: TraceInfo | None
    not_scraped: str = ""
    no_clocks: str = ""

    def earlier(self, name: str) -> RankStatus | None:
        return next((rank for rank in self.before.ranks if rank.name == name), None)


def check_server(
    server: Server, targets: Path | None = None, sleep: Callable[[float], None] = time.sleep
) -> list[Finding]:
    """All checks, in order; the first alone where nobody answers. targets: the file by which a
    Prometheus finds its exporters; None: there is none here."""
    try:
        before, requested_s = fetch_status(server), time.monotonic()
        sleep(SAMPLE_INTERVAL_S)
        status, seconds = fetch_status(server), time.monotonic() - requested_s
    except ConfigError as error:
        advice = "is it running there (tandem serve), and is this its key (--api-key)?"
        return [Finding("reached", "error", error.message, advice)]
    snapshot = ServerSnapshot(before, status, seconds, None, None)
    try:
        snapshot = snapshot._replace(scraped=_scrape(server))
    except ConfigError as error:
        snapshot = snapshot._replace(not_scraped=error.message)
    try:
        snapshot = snapshot._replace(clocks=parse_note(server, fetch_trace(server, 0.0)))
    except ConfigError as error:
        snapshot = snapshot._replace(no_clocks=error.message)
    ranks = [one.name for one in snapshot.status.ranks if one.healthy]
    return [*findings_of(snapshot), check_exporters(targets, ranks, server.key)]


def findings_of(snapshot: ServerSnapshot) -> list[Finding]:
    """Of what the server itself says, in order."""
    checks = (
        _reached,
        _version,
        _ranks,
        _epochs,
        _clocks,
        _pools,
        _load,
        _planner,
        _metrics,
        _keys,
    )
    return [check(snapshot) for check in checks]


def _scrape(server: Server) -> MetricSamples:
    """Raises ConfigError."""
    try:
        with httpx.Client(
            base_url=server.url, headers=bearer(server.key), timeout=REQUEST_TIMEOUT_S
        ) as client:
            answer = client.get("/metrics")
        if answer.status_code != 200:
            raise ConfigError(f"/metrics answered {answer.status_code}")
        families = text_string_to_metric_families(answer.text[:MAX_BYTES])
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"/metrics: {str(error) or type(error).__name__}") from None


def _reached(snapshot: ServerSnapshot) -> Finding:
    found = f"{snapshot.status.model}, {len(snapshot.status.ranks)} ranks"
    if snapshot.status.problems:
        detail = "; ".join(snapshot.status.problems)
        return Finding("reached", "error", detail, "it refuses requests (503): see its log folder")
    return Finding("reached", "ok", f"{found}, ready")


def _version(snapshot: ServerSnapshot) -> Finding:
    ours, theirs = version(), snapshot.status.version
    if ours != theirs:
        advice = "its answers may have other fields: use the same version here"
        return Finding("version", "warning", f"the server's {theirs}, ours {ours}", advice)
    return Finding("version", "ok", theirs)


def _ranks(snapshot: ServerSnapshot) -> Finding:
    lost = [
        f"{one.name}: {one.reason or 'not healthy'}"
        for one in snapshot.status.ranks
        if not one.healthy
    ]
    if lost:
        advice = "prefill workers are replaced by themselves; restart the server for others"
        return Finding("ranks", "error", "; ".join(lost), advice)
    if not snapshot.status.ranks:
        return Finding("ranks", "error", "none has told its state", "see the log of `groups`")
    young = [
        one.name
        for one in snapshot.status.ranks
        if (before := snapshot.earlier(one.name)) and one.uptime_s < before.uptime_s
    ]
    if young:
        advice = "see worker_replaced and rank_failed in the logs"
        return Finding("ranks", "warning", f"just begun anew: {', '.join(young)}", advice)
    return Finding("ranks", "ok", ", ".join(one.name for one in snapshot.status.ranks))


def _epochs(snapshot: ServerSnapshot) -> Finding:
    """Attention and expert ranks have one; a prefill worker that was replaced has a later one."""
    epochs = {one.name: one.epoch for one in snapshot.status.ranks if one.healthy}
    joined = {name: epoch for name, epoch in epochs.items() if not name.startswith("prefill")}
    detail = ", ".join(f"{name} {epoch}" for name, epoch in epochs.items())
    if len(set(joined.values())) > 1:
        advice = "they drop each other's messages: restart the server"
        return Finding("epochs", "error", detail, advice)
    return Finding("epochs", "ok", detail or "of no rank")


def _clocks(snapshot: ServerSnapshot) -> Finding:
    if snapshot.clocks is None:
        return Finding(
            "clocks", "warning", snapshot.no_clocks, "ask again: one trace runs at a time"
        )
    if snapshot.clocks.missing:
        detail = "; ".join(f"{name}: {why}" for name, why in snapshot.clocks.missing.items())
        return Finding("clocks", "warning", detail, "they hang, or have just been replaced")
    apart = {n: r.clock for n, r in snapshot.clocks.ranks.items() if not r.clock.is_shared}
    if not apart:
        return Finding("clocks", "ok", "all processes share one")
    name, worst = max(apart.items(), key=lambda item: item[1].uncertainty_ms)
    detail = f"{len(apart)} of another node, known to within {worst.uncertainty_ms:.2f} ms ({name})"
    if worst.uncertainty_ms > UNCERTAIN_MS:
        advice = "round trips are slow: the node is overloaded, or the network is"
        return Finding("clocks", "warning", detail, advice)
    return Finding("clocks", "ok", detail)


def _pools(snapshot: ServerSnapshot) -> Finding:
    """Blocks that a rank holds though it had nothing to do at either look belong to nobody."""
    wholes, leaks, changed = 0.0, list[str](), list[str]()
    for rank in snapshot.status.ranks:
        blocks, before = rank.sections.get("kv_blocks", {}), snapshot.earlier(rank.name)
        earlier = {} if before is None else before.sections.get("kv_blocks", {})
        wholes += sum(blocks.values())
        if before is None or not earlier:
            continue
        if sum(blocks.values()) != sum(earlier.values()) and rank.uptime_s >= before.uptime_s:
            changed.append(f"{rank.name}: {sum(earlier.values()):g}, then {sum(blocks.values()):g}")
        idle = not any((rank.running, rank.waiting, before.running, before.waiting))
        used = min(blocks.get("used", 0.0), earlier.get("used", 0.0))
        if idle and used:
            leaks.append(f"{rank.name} holds {used:g} blocks and has no sequence")
    if leaks or changed:
        advice = "report it, with the log; a restart gives them back"
        return Finding("KV pools", "error", "; ".join([*leaks, *changed]), advice)
    return Finding("KV pools", "ok", f"{wholes:,.0f} blocks, each free, cached or in use")


def _load(snapshot: ServerSnapshot) -> Finding:
    waiting = sum(sum(load.waiting.values()) for load in snapshot.status.pipelines.values())
    full = [f"{name} {part:.0%}" for name, part in _busy(snapshot) if part > BUSY_FRACTION]
    beyond = [
        f"{name} {part:.1f} of its threshold" for name, part in _saturation(snapshot) if part > 1
    ]
    requests = sum(load.requests for load in snapshot.status.pipelines.values())
    detail = f"{requests} requests under way, {waiting} sequences wait"
    if full and waiting:
        advice = "at its limit: `tandem plan` says what one more rank would give"
        return Finding("load", "warning", f"{detail}; busy: {', '.join(full)}", advice)
    if beyond:
        detail = f"{detail}; work waits at {', '.join(beyond)}"
    return Finding("load", "ok", detail)


def _busy(snapshot: ServerSnapshot) -> Iterator[tuple[str, float]]:
    """The part of the time between both looks in which each rank computed."""
    for rank in snapshot.status.ranks:
        before = snapshot.earlier(rank.name)
        if before is not None and before.uptime_s < rank.uptime_s:
            spent_s = _spent_s(rank) - _spent_s(before)
            yield rank.name, max(0.0, spent_s / (rank.uptime_s - before.uptime_s))


def _spent_s(rank: RankStatus) -> float:
    stages = rank.sections.get("stage_s", {})
    return sum(stages.get(stage, 0.0) for stage in BUSY)


def _saturation(snapshot: ServerSnapshot) -> Iterator[tuple[str, float]]:
    scraped = snapshot.scraped or {}
    for (name, labels), threshold in scraped.items():
        if name == metrics.SATURATION.name and threshold > 0:
            yield dict(labels)["rank"], scraped.get((metrics.LOAD.name, labels), 0.0) / threshold


def _planner(snapshot: ServerSnapshot) -> Finding:
    notes = {
        one.name: one.notes["planner"] for one in snapshot.status.ranks if "planner" in one.notes
    }
    without = {name: note for name, note in notes.items() if note != "ready"}
    if without:
        detail = "; ".join(f"{name}: {note}" for name, note in without.items())
        advice = "batches run by the section `schedule`: see planner_state in the ranks' logs"
        return Finding("planner", "warning", detail, advice)
    scraped = snapshot.scraped or {}
    predicted_s = scraped.get((metrics.PLAN_PREDICTED.name, ()))
    measured_s = scraped.get((metrics.PLAN_MEASURED.name, ()))
    if predicted_s is None or not measured_s:
        return Finding("planner", "ok", "no batch has been predicted and measured yet")
    off = predicted_s / measured_s - 1
    detail = (
        f"{1e3 * predicted_s:.2f} ms predicted, {1e3 * measured_s:.2f} ms measured ({off:+.0%})"
    )
    if abs(off) > WRONG_FRACTION:
        advice = "one batch says little; if it stays so: `tandem profile`, or planner.refit=true"
        return Finding("planner", "warning", detail, advice)
    return Finding("planner", "ok", f"the latest batch: {detail}")


def _metrics(snapshot: ServerSnapshot) -> Finding:
    if snapshot.scraped is None:
        advice = "Prometheus cannot scrape it either: see the ingress's log"
        return Finding("metrics", "error", snapshot.not_scraped, advice)
    detail = {dict(labels).get("rank") for _, labels in snapshot.scraped}
    silent = [one.name for one in snapshot.status.ranks if one.healthy and one.name not in detail]
    if silent:
        advice = "their series are missing on every board: see rank_metrics_failed in the log"
        return Finding("metrics", "warning", f"nothing of {', '.join(silent)}", advice)
    return Finding("metrics", "ok", f"{len(snapshot.scraped):,} series, of every rank")


def _keys(snapshot: ServerSnapshot) -> Finding:
    """As far as a scrape tells: whether files of keys were refused."""
    name = metrics.KEYS_RELOADED.name
    refused = (snapshot.scraped or {}).get((name, (("outcome", "refused"),)), 0.0)
    taken = (snapshot.scraped or {}).get((name, (("outcome", "taken"),)), 0.0)
    detail = f"changed files: {taken:g} taken, {refused:g} refused since the start"
    if refused:
        advice = "the old keys stay until the file is right: see keys_refused in the ingress's log"
        return Finding("keys", "warning", detail, advice)
    return Finding("keys", "ok", detail)
