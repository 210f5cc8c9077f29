"""A prefill worker's place in its group: who is in it now, and how he is ended."""

from __future__ import annotations

import logging

import ray

from actors.channels.neighbour import end
from actors.ranks.remote import RayRank
from cluster.fleet.placement import Node
from cluster.fleet.rank_watch import RankWatch
from contracts.logs import event
from contracts.worker import RankReady, WorkerSpec

log = logging.getLogger("tandem.prefill_group")


class Member:
    """problem: why whoever is in it is being replaced; empty: he works."""

    def __init__(self, spec: WorkerSpec, rank: RayRank, ready: RankReady, node: Node) -> None:
        self.settle(spec, rank, ready, node)

    def settle(self, spec: WorkerSpec, rank: RayRank, ready: RankReady, node: Node) -> None:
        self.spec, self.rank, self.ready, self.node = spec, rank, ready, node
        self.problem = ""
        self._watch = RankWatch(rank)

    def look(self, now_s: float, stalled_s: float) -> str:
        """Why it must be replaced; empty: it need not. stalled_s: how long we did not look."""
        return self._watch.look(now_s, stalled_s)

    def kill(self) -> None:
        """Ray lets a process that hangs have five seconds to end by itself; one of this machine
        need not."""
        try:
            if not end(self.ready.whereabouts):
                event(log, "worker_not_here", name=self.ready.name)
        except OSError as error:
            event(log, "worker_not_killed", name=self.ready.name, error=error)
        ray.kill(self.rank.actor)
