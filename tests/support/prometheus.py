"""A Prometheus as a process of its own, with our rules, and what it answers."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from cluster.fleet.targets_file import SUFFIX
from cluster.http.server import free_port
from contracts.errors import LaunchError
from dashboards.rules import MIN_BATCHES, alerts_file, recording_file

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
EVERYTHING = ".*"
EVALUATED_EVERY_S = 0.5
_UNITS = {"s": 1, "m": 60, "h": 3600}


class Points(NamedTuple):
    """A line: legend labels, and (time, value) of each step."""

    labels: dict[str, str]
    values: list[tuple[float, float]]


class Series(NamedTuple):
    labels: dict[str, str]
    value: float


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


def _at_pace(rules: dict[str, Any], faster: float) -> dict[str, Any]:
    """The rules with shorter durations, but of at least two evaluations."""

    def shorter(duration: str) -> str:
        seconds = int(duration[:-1]) * _UNITS[duration[-1]] / faster
        return f"{round(1e3 * max(seconds, 2 * EVALUATED_EVERY_S))}ms"

    (group,) = rules["groups"]
    for rule in group["rules"]:
        windows = re.sub(r"\[(\w+)]", lambda found: f"[{shorter(found[1])}]", rule["expr"])
        rule["expr"] = windows.replace(f"> {MIN_BATCHES}", f"> {MIN_BATCHES / faster:g}")
        if "for" in rule:
            rule["for"] = shorter(rule["for"])
    return {"groups": [group | {"interval": f"{round(1e3 * EVALUATED_EVERY_S)}ms"}]}


def config_of(
    folder: Path, targets: list[str], *, listed: Path, scrape_s: float, faster: float
) -> Path:
    """Write a configuration that scrapes targets and those in `listed`, with faster rules."""
    files = {"recording.yml": recording_file(), "alerts.yml": alerts_file()}
    for name, rules in files.items():
        (folder / name).write_text(yaml.safe_dump(_at_pace(rules, faster)), encoding="utf-8")
    interval = f"{round(1e3 * scrape_s)}ms"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "rule_files": list(files),
        "scrape_configs": [
            {
                "job_name": "tandem",
                "honor_labels": True,
                "static_configs": [{"targets": targets, "labels": {"cluster": "tandem"}}],
                "file_sd_configs": [{"files": [f"{listed}/*{SUFFIX}"]}],
            }
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


class Prometheus:
    """A running server. cluster, window: values of a dashboard's variables in queries."""

    def __init__(
        self, folder: Path, config: Path, *, cluster: str = EVERYTHING, window: str = "20s"
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder, self._config = folder, config
        self._variables = {
            "$cluster": cluster,
            "$group": EVERYTHING,
            "$rank": EVERYTHING,
            "$__rate_interval": window,
        }

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--enable-feature=exemplar-storage",
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

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._stop()

    def now(self, expression: str) -> list[Series]:
        found = self.get("/api/v1/query", query=self._chosen(expression))["result"]
        return [Series(one["metric"], float(one["value"][1])) for one in found]

    def sum(self, expression: str) -> float:
        """Of all series; 0 where there is none."""
        return sum(series.value for series in self.now(expression))

    def lines(
        self, expression: str, *, end_s: float, seconds: float, step_s: float
    ) -> list[Points]:
        """Of the `seconds` up to end_s."""
        found = self.get(
            "/api/v1/query_range",
            query=self._chosen(expression),
            start=str(end_s - seconds),
            end=str(end_s),
            step=str(step_s),
        )
        return [
            Points(one["metric"], [(at, float(value)) for at, value in one["values"]])
            for one in found["result"]
        ]

    def firing(self) -> set[str]:
        """Names of alerts."""
        return {labels["alertname"] for labels, _ in self.now('ALERTS{alertstate="firing"}')}

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        body = self._client.get(path, params=parameters).json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]

    def _chosen(self, expression: str) -> str:
        """As Grafana asks."""
        for name, value in self._variables.items():
            expression = expression.replace(name, value)
        return expression

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
