"""Is what a prefill worker says of its capacity true? Workers are processes with a fixed quota of a
core each (cgroup v1, root), so that another one brings its own. At light load one worker says how
much would go, and what another one would add; then as much comes as there is room for, before one
worker and before two.

    python -m benchmarks.capacity_measured [--quota 0.25] [--light 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.ranks.local_group import LocalGroup
from benchmarks.harness import record
from benchmarks.prefill_rows import Rows
from benchmarks.prefill_sides import RoutedPrefill
from cluster.files.model_folder import resolve_model_folder
from contracts.config import BUNDLED, TandemConfig
from contracts.loading import load_config
from models.spec.model import read_spec

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
SHARES = 65_536  # before whatever else runs on the machine
WINDOW_S = 62.0  # of the workers' own figures, and a little
WARM_S = 5.0
AT_ONCE = 512  # rows under way at full load
SMALLEST, LARGEST = 40, 160  # tokens of a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quota", type=float, default=0.25, help="of a core, each worker")
    parser.add_argument("--light", type=float, default=3.0, help="rows/s")
    parser.add_argument("--seconds", type=float, default=25.0, help="of full load")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    one, two = _one(1, options), _one(2, options)
    truth = two["full_per_s"] / one["full_per_s"] - 1
    summary = {
        "one": one,
        "two": two,
        "headroom_said_over_true": (one["said_per_s"] - options.light)
        / (one["full_per_s"] - options.light),
        "one_more_said_over_true": one["said_gain"]
        * one["said_per_s"]
        / (two["full_per_s"] - one["full_per_s"]),
        "gain_true": truth,
    }
    print(summary)
    record("capacity_measured", options, {}, summary, {"folder": BUNDLED})


def _one(workers: int, options: argparse.Namespace) -> dict[str, float]:
    folder = resolve_model_folder(BUNDLED)
    config = load_config(
        None,
        [
            "groups.attention_ranks=0",
            "groups.expert_ranks=0",
            f"groups.prefill_ranks={workers}",
            "model.dtype=float32",
        ],
    )
    with (
        LocalGroup(str(folder), config) as group,
        _quotas([process.pid for process in group.processes.values()], options.quota),
    ):
        return asyncio.run(_measured(group, folder, config, options))


async def _measured(
    group: LocalGroup, folder: Path, config: TandemConfig, options: argparse.Namespace
) -> dict[str, float]:
    side = RoutedPrefill(group, folder, config, torch.float32)
    source, vocabulary = random.Random(os.getpid()), read_spec(folder).vocab_size

    async def row() -> None:
        tokens = source.randint(SMALLEST, LARGEST)
        ids = [source.randrange(4, vocabulary) for _ in range(tokens)]  # no other's prefix
        await side.run(Rows([ids], [5, 6]))

    await side.start()
    found: dict[str, float] = {}
    try:
        if config.groups.prefill_ranks == 1:
            await _at_rate(row, options.light)
            found["used_fraction"] = _mean(group, "tandem_capacity_used_fraction")
            found["said_per_s"] = options.light / found["used_fraction"]
            found["said_gain"] = _mean(group, "tandem_capacity_gain_fraction")
        found["full_per_s"] = await _full(row, options.seconds)
    finally:
        await side.close()
    return found


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


async def _at_rate(row: Any, per_s: float) -> None:
    """Open loop, Poisson."""
    source, end_s = random.Random(0), time.monotonic() + WINDOW_S
    asked = []
    due_s = time.monotonic()
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        asked.append(asyncio.create_task(row()))
        due_s += source.expovariate(per_s)
    await asyncio.gather(*asked)


async def _full(row: Any, seconds: float) -> float:
    """Rows per second while AT_ONCE are always under way."""
    begin_s = time.monotonic() + WARM_S
    end_s, ended = begin_s + seconds, 0

    async def asking() -> None:
        nonlocal ended
        while time.monotonic() < end_s:
            await row()
            ended += begin_s < time.monotonic() <= end_s

    await asyncio.gather(*(asking() for _ in range(AT_ONCE)))
    return ended / seconds


def _mean(group: LocalGroup, name: str) -> float:
    text = "".join(group.metrics().values())
    found = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
    return sum(found) / len(found)


if __name__ == "__main__":
    main()
