"""Two Ray nodes on one machine: two network namespaces, joined by a link whose rate can be limited.

    namespace a (Ray head, 10.77.0.1) ── veth, `tc tbf` at both ends ── namespace b (10.77.0.2)

Processes, /tmp and /dev/shm are shared by both: TCP channels cross the link, shared memory would go
around it. Needs root and iproute2. The kernel may lack `netem`: rates are limited, delays are not.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{HEAD}:6379"
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default is 15: on a busy machine ranks would starve
}
BURST_BYTES = 68 << 10  # that pass at once after a pause; tbf needs more than a segment, 64 KiB
# BBR, the default of some machines, at times stands still for 70 ms on a link as short as this.
CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control=reno"
_DEADLINE_S = 90


class TwoNodes(NamedTuple):
    """Namespaces and their ends of the link, the head's first."""

    names: tuple[str, str]
    cards: tuple[str, str]

    def inside(self, node: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on the node (0 or 1)."""
        return ("ip", "netns", "exec", self.names[node])

    def limit_rate(self, megabits_per_s: float) -> None:
        """Bounds each direction of the link from now on."""
        for node, card in enumerate(self.cards):
            tbf = ("tbf", "rate", f"{megabits_per_s:g}mbit", "burst", str(BURST_BYTES))
            run(
                *(*self.inside(node), "tc", "qdisc", "replace", "dev", card, "root"),
                *(*tbf, "latency", "400ms"),
            )


def run(*command: str, check: bool = True) -> str:
    """The command's standard output. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, env=ENVIRONMENT
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def two_namespaces() -> Iterator[TwoNodes]:
    """Two namespaces, joined. Everything that runs in them ends with them. Raises RuntimeError."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise RuntimeError("network namespaces need root and iproute2")
    nodes = TwoNodes(
        (f"tandem{os.getpid()}a", f"tandem{os.getpid()}b"),
        (f"tv{os.getpid()}a", f"tv{os.getpid()}b"),
    )
    try:
        _join(nodes)
        yield nodes
    finally:
        for name in nodes.names:
            for pid in run("ip", "netns", "pids", name, check=False).split():
                run("kill", "-9", pid, check=False)
            run("ip", "netns", "del", name, check=False)


def _join(nodes: TwoNodes) -> None:
    for name in nodes.names:
        run("ip", "netns", "add", name)
    run("ip", "link", "add", nodes.cards[0], "type", "veth", "peer", "name", nodes.cards[1])
    for node, (card, address) in enumerate(zip(nodes.cards, (HEAD, OTHER), strict=True)):
        run("ip", "link", "set", card, "netns", nodes.names[node])
        inside = (*nodes.inside(node), "ip")
        run(*inside, "addr", "add", f"{address}/24", "dev", card)
        run(*inside, "link", "set", card, "up")
        run(*inside, "link", "set", "lo", "up")
        run(*nodes.inside(node), "sysctl", "-qw", CONGESTION_CONTROL)


@contextmanager
def ray_nodes(nodes: TwoNodes) -> Iterator[None]:
    """A Ray head in the first namespace and a node in the second, for as long as those are there.
    Raises RuntimeError."""
    ray = str(Path(sys.executable).parent / "ray")
    folder = tempfile.mkdtemp(prefix="tr")
    common = ("--num-cpus=4", "--object-store-memory=100000000", "--include-log-monitor=false")
    head = ("--head", "--no-monitor", f"--node-ip-address={HEAD}", "--include-dashboard=false")
    other = (f"--address={ADDRESS}", f"--node-ip-address={OTHER}")
    try:
        for node, options in enumerate(((*head, f"--temp-dir={folder}"), other)):
            run(*nodes.inside(node), ray, "start", *options, *common)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
