"""The server of a soak: `tandem serve` under limits, and its processes by what they are."""

from __future__ import annotations

import contextlib
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import yaml

from benchmarks.support.server import ServerProcess

KEYS = ("soak-key-one", "soak-key-two", "soak-key-three")
DESCRIPTORS = 1024  # RLIMIT_NOFILE of every process of the server
DATA_BYTES = 8 << 30  # RLIMIT_DATA of every process: what one may allocate
MEMORY_BYTES = 6 << 30  # resident, of all processes together: watched
START_S = 300.0  # on a machine that others use too
MAX_CONTEXT_TOKENS = 512  # with MAX_ITEMS: the largest legal request is seconds of work, not hours
MAX_ITEMS = 32
MAX_BODY_BYTES = 1 << 20
POOL_TOKENS = 16_384
# One of each rank, as small as a server of both pipelines can be. float32: answers that are
# compared should not depend on who shared a batch.
CONFIG = {
    "model": {"dtype": "float32", "max_context_tokens": MAX_CONTEXT_TOKENS},
    "groups": {
        "attention_ranks": 1,
        "expert_ranks": 1,
        "prefill_ranks": 1,
        "ready_timeout_s": START_S,
    },
    "kv": {"pool_tokens": POOL_TOKENS},
    "http": {
        "api_keys": list(KEYS),
        "max_body_bytes": MAX_BODY_BYTES,
        "max_batch_items": MAX_ITEMS,
        "request_timeout_s": 120.0,
    },
}
OURS = re.compile(r"tandem|attention|expert|prefill|planner|WorkerShell|Ingress|Groups")
_ROLES = re.compile(r"(attention-\d+|expert-\d+|prefill-\d+|planner|Ingress|Groups)")


@contextlib.contextmanager
def limited_server(log: Path) -> Iterator[ServerProcess]:
    """A server that answers, its processes under RLIMIT_NOFILE and RLIMIT_DATA. log: a file for
    what it writes."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        path = Path(folder) / "soak.yaml"
        path.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        limits = {resource.RLIMIT_NOFILE: DESCRIPTORS, resource.RLIMIT_DATA: DATA_BYTES}
        with ServerProcess("--config", str(path), limits=limits, log=log) as server:
            server.wait_healthy(START_S)
            yield server


def processes(server: ServerProcess) -> dict[str, psutil.Process]:
    """The processes of Tandem's own, by role. Those of Ray are `others`."""
    root = psutil.Process(server.pid)
    return {"serve": root, **roles_of([root])}


def roles_of(roots: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """Those among the descendants of `roots`."""
    found: dict[str, psutil.Process] = {}
    for process in [child for root in roots for child in root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()[:1])
            if title.startswith("ray::") and OURS.search(title):
                role = _ROLES.search(title)
                _add(found, role[1].lower() if role else title[5:], process)
    return found


def _add(found: dict[str, psutil.Process], role: str, process: psutil.Process) -> None:
    name, number = role, 1
    while name in found:
        number += 1
        name = f"{role} {number}"
    found[name] = process


def others(server: ServerProcess, ours: dict[str, psutil.Process]) -> list[psutil.Process]:
    """Ray's own: GCS, raylet, agents, Serve's controller, idle workers."""
    known = {process.pid for process in ours.values()}
    everything = psutil.Process(server.pid).children(recursive=True)
    return [process for process in everything if process.pid not in known]


def listening_ports(ours: dict[str, psutil.Process], http_port: int) -> list[int]:
    """TCP ports on which ranks and channels of ours listen: strangers will come there."""
    ports = set()
    for name, process in ours.items():
        if name in ("serve", "ingress", "groups"):
            continue
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return sorted(ports - {http_port})


def abstract_sockets(ours: dict[str, psutil.Process]) -> list[str]:
    """Names of the abstract Unix sockets on which ranks listen (shared memory begins there)."""
    names = set()
    for process in ours.values():
        for connection in process.net_connections(kind="unix"):
            if str(connection.laddr).startswith("@") and "ray" not in str(connection.laddr):
                names.add(str(connection.laddr))
    return sorted(names)
