"""What a process holds, counted after each fault: nothing may grow with faults of one kind.

Warm-up: the first fault of a kind that a process lives through may leave something that it keeps (a
map of a checkpoint's pages, a thread); what it holds after that is what it may hold. And who is
connected at the moment of counting makes a small difference, of which the highest is seen after few
faults: a leak has no highest. So a process leaks if after GROWS faults, of kinds that it has lived
through before, it holds more than ever before. Segments in a /dev/shm of our own, and how many
processes there are, are counted likewise, for all together.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

ALL_PROCESSES = "all"  # in the place of a process's role
GROWS = 3

Counts = Mapping[str, int]


class Leaks:
    """Pure. allowed: by process, what it may hold. grew: how often it held more."""

    def __init__(self) -> None:
        self._allowed: dict[tuple[str, int], Counter[str]] = {}
        self._grew: Counter[tuple[tuple[str, int], str]] = Counter()
        self._lived_through: dict[tuple[str, int], set[str]] = {}

    def grown(
        self, label: str, held: Mapping[tuple[str, int], Counts], *, last: bool = True
    ) -> list[str]:
        """What leaks, in words; if it is not `last`, what has grown since. label: of the fault.
        held: by (role, process id). last: it is not asked again after this fault, and what is new
        becomes what may be."""
        found = []
        for key, counts in held.items():
            allowed = self._allowed.get(key, Counter(counts))
            more = [what for what, count in counts.items() if count > allowed[what]]
            for what in more if label in self._lived_through.get(key, ()) else ():
                self._grew[key, what] += last
                if not last or self._grew[key, what] >= GROWS:
                    growth = f"{counts[what]} {what} after {label}, and {allowed[what]} before"
                    found.append(f"{key[0]} holds {growth}")
            if last:
                self._allowed[key] = allowed | Counter(counts)
                self._lived_through.setdefault(key, set()).add(label)
        return found


def held(roles: Mapping[str, int], http_ports: set[int]) -> dict[tuple[str, int], Counts]:
    """Of each process that is there. http_ports: connections to these are the clients', who come
    and go."""
    found = {}
    for role, pid in roles.items():
        with contextlib.suppress(psutil.Error, OSError):
            found[role, pid] = _of_process(pid, http_ports)
    return found


def shared(others: int, shm: bool) -> dict[tuple[str, int], Counts]:
    """Of all together. others: processes that have no role. shm: whether /dev/shm is ours alone."""
    counts = {"processes": others}
    if shm:
        counts["segments"] = sum(1 for _ in Path("/dev/shm").iterdir())
    return {(ALL_PROCESSES, 0): counts}


def _of_process(pid: int, http_ports: set[int]) -> Counts:
    process = psutil.Process(pid)
    counts: Counter[str] = Counter(threads=process.num_threads(), children=0)
    counts["children"] = len(process.children(recursive=True))
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kind = os.readlink(fd).partition(":")[0]
            named = "sockets" if kind == "socket" else "descriptors"
            counts[named] += 1
    clients = [
        one
        for one in process.net_connections(kind="tcp")
        if one.status != psutil.CONN_LISTEN and one.laddr and one.laddr.port in http_ports
    ]
    counts["sockets"] -= len(clients)
    return counts
