"""A Prometheus as a process of its own, with our rules, and what it answers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx
import yaml

from cluster.serving.front import free_port
from contracts.errors import LaunchError
from dashboards.rules import NORMAL, Pace, alerts_file, recording_file

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
VARIABLES = {"$cluster": ".*", "$group": ".*", "$rank": ".*"}


class Points(NamedTuple):
    """A line: legend labels, and (time, value) of each step."""

    labels: dict[str, str]
    values: list[tuple[float, float]]


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """A context manager. targets: "host:port" whose /metrics is scraped. pace: of the rules."""

    def __init__(
        self, folder: Path, targets: list[str], *, scrape_s: float = 1.0, pace: Pace = NORMAL
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        files = {"recording.yml": recording_file(pace), "alerts.yml": alerts_file(pace)}
        for name, rules in files.items():
            (folder / name).write_text(yaml.safe_dump(rules), encoding="utf-8")
        interval = f"{round(1e3 * scrape_s)}ms"
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "rule_files": list(files),
            "scrape_configs": [
                {
                    "job_name": "tandem",
                    "honor_labels": True,
                    "static_configs": [{"targets": targets, "labels": {"cluster": "tandem"}}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        self._client = httpx.Client(base_url=self.url, timeout=10.0)
        end_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/-/ready").status_code == 200:
                    return self
            time.sleep(0.1)
        self._stop()
        raise LaunchError((self._folder / "prometheus.log").read_text(encoding="utf-8")[-2000:])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()
        self._stop()

    def now(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series."""
        found = self._ask("/api/v1/query", query=with_variables(expression))
        return [(one["metric"], float(one["value"][1])) for one in found]

    def lines(
        self, expression: str, *, end_s: float, seconds: float, step_s: float
    ) -> list[Points]:
        """Of the `seconds` up to end_s."""
        found = self._ask(
            "/api/v1/query_range",
            query=with_variables(expression),
            start=str(end_s - seconds),
            end=str(end_s),
            step=str(step_s),
        )
        return [
            Points(one["metric"], [(at, float(value)) for at, value in one["values"]])
            for one in found
        ]

    def firing(self) -> set[str]:
        """Names of alerts."""
        return {labels["alertname"] for labels, _ in self.now('ALERTS{alertstate="firing"}')}

    def _ask(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        answer = self._client.get(path, params=parameters)
        body = answer.json()
        assert body["status"] == "success", (parameters, body)
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def with_variables(expression: str, window: str = "20s") -> str:
    """As Grafana asks, everything chosen."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression.replace("$__rate_interval", window)
