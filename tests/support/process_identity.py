"""Identity of another process, as `own_identity` encodes it."""

import msgspec

from actors.channels import local_process
from actors.channels.local_process import LocalProcess, ProcessIdentity


def process_identity_of(pid: int, *, later_ticks: int = 0) -> bytes:
    """Return its identity, started later_ticks later."""
    process = LocalProcess(pid)
    start_ticks = process.start_ticks + later_ticks
    process.close()
    me = msgspec.msgpack.decode(local_process.own_identity(), type=ProcessIdentity)
    return msgspec.msgpack.encode(ProcessIdentity(me.machine, pid, start_ticks, me.network))
