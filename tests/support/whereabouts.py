"""Where another process is, as it would say of itself."""

from __future__ import annotations

import msgspec

from actors.channels import neighbour
from actors.channels.neighbour import Neighbour, Whereabouts


def whereabouts_of(pid: int, *, later_ticks: int = 0) -> bytes:
    """later_ticks: by how much later than it the process has started that is meant."""
    process = Neighbour(pid)
    started = process.started + later_ticks
    process.close()
    me = msgspec.msgpack.decode(neighbour.here(), type=Whereabouts)
    return msgspec.msgpack.encode(Whereabouts(me.machine, pid, started, me.network))
