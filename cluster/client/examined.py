"""`tandem doctor --url`: what is wrong with a server that runs, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.api.answer_types import Status
from cluster.client.answers import Server
from cluster.client.exporters import exporters_finding
from cluster.client.status import ask_status
from cluster.client.trace import fetch_trace, note_of
from cluster.files.findings import Finding
from cluster.files.server_url import bearer
from cluster.files.version import version
from contracts import metrics
from contracts.errors import ConfigError
from contracts.events import BUSY
from contracts.traces import TraceNote
from contracts.worker import RankStatus

LOOK_S: Final = 2.0  # between two looks at what the ranks do
ASK_S: Final = 10.0
MAX_BYTES: Final = 32 << 20
BUSY_FRACTION: Final = 0.95
WRONG_FRACTION: Final = 0.3  # by which a prediction of the planner may be off
UNCERTAIN_MS: Final = 5.0

Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, labels) -> value


class Seen(NamedTuple):
    """Two looks at a server, and what lies between them. scraped, clocks: None, and why not."""

    before: Status
    status: Status
    seconds: float
    scraped: Scraped | None
    clocks: TraceNote | None
    not_scraped: str = ""
    no_clocks: str = ""

    def earlier(self, name: str) -> RankStatus | None:
        return next((rank for rank in self.before.ranks if rank.name == name), None)


def examine_server(
    server: Server, targets: Path | None = None, sleep: Callable[[float], None] = time.sleep
) -> list[Finding]:
    """All checks, in order; the first alone where nobody answers. targets: the file by which a
    Prometheus finds its exporters; None: there is none here."""
    try:
        before, asked_s = ask_status(server), time.monotonic()
        sleep(LOOK_S)
        status, seconds = ask_status(server), time.monotonic() - asked_s
    except ConfigError as error:
        advice = "is it running there (tandem serve), and is this its key (--api-key)?"
        return [Finding("reached", "error", error.message, advice)]
    seen = Seen(before, status, seconds, None, None)
    try:
        seen = seen._replace(scraped=_scrape(server))
    except ConfigError as error:
        seen = seen._replace(not_scraped=error.message)
    try:
        seen = seen._replace(clocks=note_of(server, fetch_trace(server, 0.0)))
    except ConfigError as error:
        seen = seen._replace(no_clocks=error.message)
    ranks = [one.name for one in seen.status.ranks if one.healthy]
    return [*findings_of(seen), exporters_finding(targets, ranks, server.key)]


def findings_of(seen: Seen) -> list[Finding]:
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
    return [check(seen) for check in checks]


def _scrape(server: Server) -> Scraped:
    """Raises ConfigError."""
    try:
        with httpx.Client(base_url=server.url, headers=bearer(server.key), timeout=ASK_S) as client:
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


def _reached(seen: Seen) -> Finding:
    found = f"{seen.status.model}, {len(seen.status.ranks)} ranks"
    if seen.status.problems:
        told = "; ".join(seen.status.problems)
        return Finding("reached", "error", told, "it refuses requests (503): see its log folder")
    return Finding("reached", "ok", f"{found}, ready")


def _version(seen: Seen) -> Finding:
    ours, theirs = version(), seen.status.version
    if ours != theirs:
        advice = "its answers may have other fields: use the same version here"
        return Finding("version", "warning", f"the server's {theirs}, ours {ours}", advice)
    return Finding("version", "ok", theirs)


def _ranks(seen: Seen) -> Finding:
    lost = [
        f"{one.name}: {one.reason or 'not healthy'}" for one in seen.status.ranks if not one.healthy
    ]
    if lost:
        advice = "prefill workers are replaced by themselves; restart the server for others"
        return Finding("ranks", "error", "; ".join(lost), advice)
    if not seen.status.ranks:
        return Finding("ranks", "error", "none has told its state", "see the log of `groups`")
    young = [
        one.name
        for one in seen.status.ranks
        if (before := seen.earlier(one.name)) and one.uptime_s < before.uptime_s
    ]
    if young:
        advice = "see worker_replaced and rank_failed in the logs"
        return Finding("ranks", "warning", f"just begun anew: {', '.join(young)}", advice)
    return Finding("ranks", "ok", ", ".join(one.name for one in seen.status.ranks))


def _epochs(seen: Seen) -> Finding:
    """Attention and expert ranks have one; a prefill worker that was replaced has a later one."""
    epochs = {one.name: one.epoch for one in seen.status.ranks if one.healthy}
    joined = {name: epoch for name, epoch in epochs.items() if not name.startswith("prefill")}
    told = ", ".join(f"{name} {epoch}" for name, epoch in epochs.items())
    if len(set(joined.values())) > 1:
        advice = "they drop each other's messages: restart the server"
        return Finding("epochs", "error", told, advice)
    return Finding("epochs", "ok", told or "of no rank")


def _clocks(seen: Seen) -> Finding:
    if seen.clocks is None:
        return Finding("clocks", "warning", seen.no_clocks, "ask again: one trace runs at a time")
    if seen.clocks.missing:
        told = "; ".join(f"{name}: {why}" for name, why in seen.clocks.missing.items())
        return Finding("clocks", "warning", told, "they hang, or have just been replaced")
    apart = {n: r.clock for n, r in seen.clocks.ranks.items() if not r.clock.is_shared}
    if not apart:
        return Finding("clocks", "ok", "all processes share one")
    name, worst = max(apart.items(), key=lambda item: item[1].uncertainty_ms)
    told = f"{len(apart)} of another node, known to within {worst.uncertainty_ms:.2f} ms ({name})"
    if worst.uncertainty_ms > UNCERTAIN_MS:
        advice = "round trips are slow: the node is overloaded, or the network is"
        return Finding("clocks", "warning", told, advice)
    return Finding("clocks", "ok", told)


def _pools(seen: Seen) -> Finding:
    """Blocks that a rank holds though it had nothing to do at either look belong to nobody."""
    wholes, leaks, changed = 0.0, list[str](), list[str]()
    for rank in seen.status.ranks:
        blocks, before = rank.sections.get("kv_blocks", {}), seen.earlier(rank.name)
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


def _load(seen: Seen) -> Finding:
    waiting = sum(sum(load.waiting.values()) for load in seen.status.pipelines.values())
    full = [f"{name} {part:.0%}" for name, part in _busy(seen) if part > BUSY_FRACTION]
    beyond = [f"{name} {part:.1f} of its threshold" for name, part in _saturation(seen) if part > 1]
    requests = sum(load.requests for load in seen.status.pipelines.values())
    told = f"{requests} requests under way, {waiting} sequences wait"
    if full and waiting:
        advice = "at its limit: `tandem plan` says what one more rank would give"
        return Finding("load", "warning", f"{told}; busy: {', '.join(full)}", advice)
    if beyond:
        told = f"{told}; work waits at {', '.join(beyond)}"
    return Finding("load", "ok", told)


def _busy(seen: Seen) -> Iterator[tuple[str, float]]:
    """The part of the time between both looks in which each rank computed."""
    for rank in seen.status.ranks:
        before = seen.earlier(rank.name)
        if before is not None and before.uptime_s < rank.uptime_s:
            spent_s = _spent_s(rank) - _spent_s(before)
            yield rank.name, max(0.0, spent_s / (rank.uptime_s - before.uptime_s))


def _spent_s(rank: RankStatus) -> float:
    stages = rank.sections.get("stage_s", {})
    return sum(stages.get(stage, 0.0) for stage in BUSY)


def _saturation(seen: Seen) -> Iterator[tuple[str, float]]:
    scraped = seen.scraped or {}
    for (name, labels), threshold in scraped.items():
        if name == metrics.SATURATION.name and threshold > 0:
            yield dict(labels)["rank"], scraped.get((metrics.LOAD.name, labels), 0.0) / threshold


def _planner(seen: Seen) -> Finding:
    notes = {one.name: one.notes["planner"] for one in seen.status.ranks if "planner" in one.notes}
    without = {name: note for name, note in notes.items() if note != "ready"}
    if without:
        told = "; ".join(f"{name}: {note}" for name, note in without.items())
        advice = "batches run by the section `schedule`: see planner_state in the ranks' logs"
        return Finding("planner", "warning", told, advice)
    scraped = seen.scraped or {}
    predicted_s = scraped.get((metrics.PLAN_PREDICTED.name, ()))
    measured_s = scraped.get((metrics.PLAN_MEASURED.name, ()))
    if predicted_s is None or not measured_s:
        return Finding("planner", "ok", "no batch has been predicted and measured yet")
    off = predicted_s / measured_s - 1
    told = f"{1e3 * predicted_s:.2f} ms predicted, {1e3 * measured_s:.2f} ms measured ({off:+.0%})"
    if abs(off) > WRONG_FRACTION:
        advice = "one batch says little; if it stays so: `tandem profile`, or planner.refit=true"
        return Finding("planner", "warning", told, advice)
    return Finding("planner", "ok", f"the latest batch: {told}")


def _metrics(seen: Seen) -> Finding:
    if seen.scraped is None:
        advice = "Prometheus cannot scrape it either: see the ingress's log"
        return Finding("metrics", "error", seen.not_scraped, advice)
    told = {dict(labels).get("rank") for _, labels in seen.scraped}
    silent = [one.name for one in seen.status.ranks if one.healthy and one.name not in told]
    if silent:
        advice = "their series are missing on every board: see rank_metrics_failed in the log"
        return Finding("metrics", "warning", f"nothing of {', '.join(silent)}", advice)
    return Finding("metrics", "ok", f"{len(seen.scraped):,} series, of every rank")


def _keys(seen: Seen) -> Finding:
    """As far as a scrape tells: whether files of keys were refused."""
    name = metrics.KEYS_READ.name
    refused = (seen.scraped or {}).get((name, (("outcome", "refused"),)), 0.0)
    taken = (seen.scraped or {}).get((name, (("outcome", "taken"),)), 0.0)
    told = f"changed files: {taken:g} taken, {refused:g} refused since the start"
    if refused:
        advice = "the old keys stay until the file is right: see keys_refused in the ingress's log"
        return Finding("keys", "warning", told, advice)
    return Finding("keys", "ok", told)
