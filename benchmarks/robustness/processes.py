"""Processes of a server by role, and the sockets on which its ranks listen."""

import contextlib
import re
from collections.abc import Sequence

import psutil

OURS = re.compile(r"tandem|attention|expert|prefill|planner|WorkerShell|Ingress|Groups")
_ROLES = re.compile(r"(attention-\d+|expert-\d+|prefill-\d+|planner|Ingress|Groups)")


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


def listening_ports(ours: dict[str, psutil.Process], http_port: int) -> list[int]:
    """Return the TCP ports on which ranks listen."""
    ports = set()
    for name, process in ours.items():
        if name in ("serve", "ingress", "groups"):
            continue
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return sorted(ports - {http_port})


def abstract_sockets(ours: dict[str, psutil.Process]) -> list[str]:
    """Return the abstract Unix sockets on which ranks listen for shared memory links."""
    names = set()
    for process in ours.values():
        for connection in process.net_connections(kind="unix"):
            if str(connection.laddr).startswith("@") and "ray" not in str(connection.laddr):
                names.add(str(connection.laddr))
    return sorted(names)
