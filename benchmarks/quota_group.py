"""A group of ranks as processes that have a fixed quota of a core each (cgroup v1, root), so that
another one brings its own; and what its ranks say of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cluster.fleet.codec import Directory
from contracts.config import TandemConfig
from contracts.traces import BUSY
from tests.support.local_group import LocalGroup

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 4_000  # as short as may be: a batch that begins with a fresh quota is quicker by that
SHARES = 65_536  # before whatever else runs on the machine

Ranks = tuple[int, int, int]  # attention, expert, prefill
Shares = dict[str, float]  # of the time in which a rank is busy, by name


@contextmanager
def quota_group(config: TandemConfig, quota: float) -> Iterator[tuple[LocalGroup, TandemConfig]]:
    """quota: of a core. A planner, where there are attention ranks, has none."""
    has_planner = config.groups.attention_ranks > 0
    with LocalGroup(config.model.path, config, planner=has_planner) as group:
        pids = [one.pid for name, one in group.processes.items() if not name.startswith("planner")]
        with _quotas(pids, quota):
            yield group, config


def directory_of(group: LocalGroup, config: TandemConfig) -> Directory:
    """Of one pipeline."""
    at, generates = group.client_addresses, config.groups.attention_ranks > 0
    return Directory(
        client_addresses=at if generates else {},
        prefill_addresses={} if generates else at,
        token=group.token,
        backend="shm",
        epoch=1,
        ranks=group.ready,
    )


class Done(NamedTuple):
    """So far. busy_s: by rank."""

    at_s: float
    tokens: float
    busy_s: Shares

    @classmethod
    def of(cls, group: LocalGroup) -> Done:
        told = group.status()
        busy_s = {one.name: sum(one.sections["stage_s"].get(s, 0.0) for s in BUSY) for one in told}
        tokens = sum(one.sections["totals"].get("computed_tokens", 0.0) for one in told)
        return cls(time.monotonic(), tokens, busy_s)

    def since(self, before: Done) -> tuple[float, Shares]:
        """Tokens a second, and the parts of the time in which ranks were busy."""
        seconds = self.at_s - before.at_s
        busy = {name: (s - before.busy_s[name]) / seconds for name, s in self.busy_s.items()}
        return (self.tokens - before.tokens) / seconds, busy


def mean_of(group: LocalGroup, name: str, **labels: str) -> float:
    """Of the series of that name with these labels."""
    text = "".join(group.metrics().values())
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith(name)]
    found = [float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted)]
    if not found:
        raise SystemExit(f"nobody has said {name} of {labels}")
    return sum(found) / len(found)


@contextmanager
def _quotas(pids: list[int], quota: float) -> Iterator[None]:
    folders = {pid: CGROUPS / f"tandem-{pid}" for pid in pids}
    try:
        for pid, folder in folders.items():
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(round(quota * PERIOD_US)))
            (folder / "cpu.shares").write_text(str(SHARES))
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid, folder in folders.items():
            (CGROUPS / "cgroup.procs").write_text(str(pid))
            folder.rmdir()
