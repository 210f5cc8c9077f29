"""Where another process is, as it would say of itself."""

from __future__ import annotations

import msgspec

from actors.channels import local_process
from actors.channels.local_process import LocalProcess, ProcessIdentity


def process_identity_of(pid: int, *, later_ticks: int = 0) -> bytes:
    """later_ticks: by how much later than it the process has started that is meant."""
    process = LocalProcess(pid)
    start_ticks = process.start_ticks + later_ticks
    process.close()
    me = msgspec.msgpack.decode(local_process.own_identity(), type=ProcessIdentity)
    return msgspec.msgpack.encode(ProcessIdentity(me.machine, pid, start_ticks, me.network))
