"""Samples of a server's processes and of what it tells about itself."""

from __future__ import annotations

import time

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.served import KEYS


class Sample(msgspec.Struct, frozen=True):
    """Of one process at one time."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int


class Told(msgspec.Struct, frozen=True):
    """From /metrics: KV blocks per rank and state, sequences that wait, ranks replaced."""

    at_s: float
    blocks: dict[str, dict[str, int]]
    waiting: int
    restarts: int


class Watch:
    """Looks at `processes`, by role, whenever it is asked. others: Ray's, counted together."""

    def __init__(
        self, processes: dict[str, psutil.Process], others: list[psutil.Process], url: str
    ) -> None:
        self.samples: dict[str, list[Sample]] = {role: [] for role in processes}
        self.ray_rss_bytes: list[int] = []
        self.told: list[Told] = []
        self.lost: list[str] = []
        self._processes = processes
        self._others = others
        self._started_s = time.monotonic()
        self._http = httpx.Client(
            base_url=url, timeout=20.0, headers={"authorization": f"Bearer {KEYS[0]}"}
        )

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._started_s

    def look(self) -> None:
        for role, process in self._processes.items():
            try:
                self.samples[role].append(_sample(process, self.now_s))
            except psutil.Error:
                if role not in self.lost:
                    self.lost.append(role)
        self.ray_rss_bytes.append(sum(_rss_bytes(process) for process in self._others))

    def total_bytes(self) -> int:
        """Resident, of all at the latest look."""
        ours = sum(samples[-1].rss_bytes for samples in self.samples.values() if samples)
        return ours + (self.ray_rss_bytes[-1] if self.ray_rss_bytes else 0)

    def scrape(self) -> Told:
        """Raises httpx.HTTPError if there is no answer of status 200."""
        answer = self._http.get("/metrics").raise_for_status()
        self.told.append(read_metrics(answer.text, self.now_s))
        return self.told[-1]

    def health(self) -> int:
        return self._http.get("/health").status_code

    def close(self) -> None:
        self._http.close()


def _sample(process: psutil.Process, at_s: float) -> Sample:
    with process.oneshot():
        return Sample(
            round(at_s, 1), process.memory_info().rss, process.num_fds(), process.num_threads()
        )


def _rss_bytes(process: psutil.Process) -> int:
    """0 if it has ended: Ray's idle workers come and go."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def read_metrics(text: str, at_s: float) -> Told:
    blocks: dict[str, dict[str, int]] = {}
    waiting = restarts = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tandem_kv_blocks":
                states = blocks.setdefault(sample.labels["rank"], {})
                states[sample.labels["state"]] = int(sample.value)
            elif sample.name == "tandem_requests_waiting":
                waiting += int(sample.value)
            elif sample.name == "tandem_rank_restarts_total":
                restarts += int(sample.value)
    return Told(round(at_s, 1), blocks, waiting, restarts)
