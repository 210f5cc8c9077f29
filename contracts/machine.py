"""Memory and processors available to this process within its control groups.

A container shows the host's /proc/meminfo; its limits are in /sys/fs/cgroup. Each level of the
hierarchy has a limit of its own, and the lowest one applies.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SYSTEM = Path("/")


def available_bytes(root: Path = SYSTEM) -> int:
    """Return the memory that this process can still allocate. root: of the files to read."""
    left = (max(0, limit - used) for limit, used in _memory_limits(root))
    return min([_meminfo(root)["MemAvailable"], *left])


def total_bytes(root: Path = SYSTEM) -> int:
    """Return the machine's memory, or the lowest limit of this process's control groups."""
    return min([_meminfo(root)["MemTotal"], *(limit for limit, _ in _memory_limits(root))])


def free_bytes(folder: Path) -> int:
    """Return the free space of a folder; in a memory file system at most the available memory."""
    free = shutil.disk_usage(folder).free
    return min(free, available_bytes()) if _is_in_memory(folder) else free


def usable_cores(root: Path = SYSTEM) -> float:
    """Return the processors that this process may use, or the quota of its control groups."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def whole_cores(root: Path = SYSTEM) -> int:
    """Return `usable_cores` as a number of threads, at least one."""
    return max(1, math.floor(usable_cores(root)))


def numa_nodes(root: Path = SYSTEM) -> list[list[frozenset[int]]]:
    """Return the usable CPUs of each core of each NUMA node; empty if a quota limits them.

    Other containers may use the CPUs of a quota at other times.
    """
    usable = os.sched_getaffinity(0)
    if any(quota < len(usable) for quota in _quotas(root)):
        return []
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    found = []
    for cpus in (_cpu_list(_text(file)) & usable for file in folders):
        siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = {_cpu_list(_text(root / siblings.format(cpu))) & cpus or {cpu} for cpu in cpus}
        found.append(sorted(map(frozenset, cores), key=min))
    return [cores for cores in found if cores]


def pinned_cpus(
    nodes: Sequence[Sequence[frozenset[int]]], ranks: int, threads: int
) -> list[frozenset[int]]:
    """Return the CPUs of each rank of a machine; empty: ranks are not pinned.

    nodes: as `numa_nodes`. A rank gets cores of one NUMA node, unless its threads need more, and
    shares none. Ranks are not pinned if they have fewer than two cores or than `threads` each.
    """
    order = [core for cores in nodes for core in cores]
    if ranks < 1 or len(order) < max(2, threads) * ranks:
        return []
    spans = [order[i * len(order) // ranks : (i + 1) * len(order) // ranks] for i in range(ranks)]
    node_of = {core: node for node, cores in enumerate(nodes) for core in cores}
    homes = [node_of[span[(len(span) - 1) // 2]] for span in spans]
    seen: Counter[int] = Counter()
    shares = []
    for home in homes:
        cores, sharers = nodes[home], homes.count(home)
        first, seen[home] = seen[home], seen[home] + 1
        shares.append(cores[first * len(cores) // sharers : (first + 1) * len(cores) // sharers])
    fit = all(len(share) >= max(2, threads) for share in shares)
    return [frozenset().union(*share) for share in (shares if fit else spans)]


def _cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8"."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return frozenset(cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1))


def _is_in_memory(folder: Path) -> bool:
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mounts = (str(one) for one in (folder.resolve(), *folder.resolve().parents))
    return next((kinds[one] for one in mounts if one in kinds), "") in ("tmpfs", "ramfs")


def _meminfo(root: Path) -> dict[str, int]:
    """Return MemTotal and MemAvailable in bytes."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        memory = psutil.virtual_memory()
        return {"MemTotal": memory.total, "MemAvailable": memory.available}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")}


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, unreclaimable use) in bytes for each level with a limit.

    Version 2: a process above memory.high is throttled until it stalls, so memory.high counts as a
    limit. Inactive file pages are reclaimable; other pages may not be.
    """
    found = []
    for folder in _levels(root, "", "cgroup"):
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        limit = min((one for one in limits if one is not None), default=None)
        used = _number(folder / "memory.current")
        found.append((limit, used, _field(folder, "inactive_file")))
    for folder in _levels(root, "memory", "cgroup/memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        found.append((limit, used, _field(folder, "total_inactive_file")))
    return [(limit, (used or 0) - idle) for limit, used, idle in found if limit is not None]


def _quotas(root: Path) -> list[float]:
    """Return the processor quota of each level that has one."""
    found = []
    for folder in _levels(root, "", "cgroup"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    for folder in _levels(root, "cpu", "cgroup/cpu"):
        microseconds = _number(folder / "cpu.cfs_quota_us")
        length = _number(folder / "cpu.cfs_period_us")
        if microseconds is not None and length:
            found.append(microseconds / length)
    return found


def _levels(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents.

    controller: of version 1; empty: version 2. In a container that mounts its own group as the
    root, the path in /proc may not exist; only the root is visible then.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        base = root / "sys/fs" / mount
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _text(path: Path) -> str:
    """Return the contents of a file, or "" if the level or controller does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Return the number in a file; None without a file or without a limit ("max", -1)."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _field(folder: Path, name: str) -> int:
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)
