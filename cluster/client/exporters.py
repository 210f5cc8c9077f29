"""Of `tandem doctor --url`: whether everybody whom a Prometheus is told to scrape answers here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx

from cluster.files.findings import Finding
from cluster.files.server_url import bearer
from cluster.files.targets_file import read_targets
from contracts.errors import ConfigError

ASK_S: Final = 5.0
AT_ONCE, MOST = 8, 512  # asked; more are not
MAX_BYTES: Final = 8 << 20
_SERIES: Final = b"tandem_"
NO_LIST: Final = (
    "not looked at: no list of them on this machine (metrics.exporters=false, or the launcher is "
    "on another one; --set serve.name=NAME, metrics.targets=FOLDER)"
)


def exporters_finding(path: Path | None, ranks: Iterable[str], key: str | None) -> Finding:
    """path: of the list; None: there is none. ranks: names of those that should be on it."""
    if path is None:
        return Finding("exporters", "ok", NO_LIST)
    try:
        listed = read_targets(path)
    except ConfigError as error:
        return Finding("exporters", "error", error.message, "remove it, and restart the server")
    named = {one.rank for one in listed}
    asked = [(one.rank, url) for one in listed for url in one.urls][:MOST]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        problems = list(threads.map(lambda each: _problem(each[1], key), asked))
    told = [f"{rank}: {why}" for (rank, _), why in zip(asked, problems, strict=True) if why]
    told += [f"{rank}: not on the list" for rank in ranks if rank not in named]
    if told:
        advice = "no Prometheus on this machine gets their series: see exporter_failed in the logs"
        if any("401" in why for why in problems):
            advice = "give http.metrics_key of the configuration as --api-key, and to Prometheus"
        return Finding("exporters", "warning", f"{path.name}: {'; '.join(told)}", advice)
    found = f"{path.name}: {len(listed)} processes, all answer"
    return Finding("exporters", "ok", found if len(asked) < MOST else f"{found} of {MOST} asked")


def _problem(url: str, key: str | None) -> str:
    """Why it is of no use to a scraper; empty: it is."""
    end_s, body = time.monotonic() + ASK_S, b""
    try:
        with httpx.stream("GET", url, headers=bearer(key), timeout=ASK_S) as answer:
            if answer.status_code != 200:
                return f"answers {answer.status_code}"
            for part in answer.iter_bytes():
                body += part
                if len(body) > MAX_BYTES or time.monotonic() > end_s:
                    return f"its answer has no end after {len(body)} bytes"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return "" if _SERIES in body else "answers, but not as Tandem does"
