"""The link between two nodes, network namespaces of this machine: cut both ways or one, or slow.

Frames of a cut direction go to an unassigned hardware address and are lost without an error. That
needs namespaces only; a slow link needs `tc tbf`.
"""

from benchmarks.robustness.schedule import Kind
from benchmarks.support.two_nodes import HEAD, OTHER, TwoNodes, run

UNUSED_MAC = "02:00:00:00:00:99"
USUAL_MBIT, SLOW_MBIT = 50.0, 5.0
_CUT_AT = {Kind.CUT: (0, 1), Kind.CUT_ONE_WAY: (0,)}  # the nodes whose frames are lost


class Links:
    def __init__(self, nodes: TwoNodes) -> None:
        self.nodes = nodes
        nodes.limit_rate(USUAL_MBIT)
        self._cut: tuple[int, ...] = ()

    def disturb(self, kind: Kind) -> None:
        """Until `mend`."""
        if kind is Kind.SLOW:
            self.nodes.limit_rate(SLOW_MBIT)
        self._cut = tuple({*self._cut, *_CUT_AT.get(kind, ())})
        for node in self._cut:
            self._set_neighbor(node, "replace", "lladdr", UNUSED_MAC, "nud", "permanent")

    def mend(self) -> None:
        cut, self._cut = self._cut, ()
        for node in cut:
            self._set_neighbor(node, "del")
        self.nodes.limit_rate(USUAL_MBIT)

    def _set_neighbor(self, node: int, verb: str, *how: str) -> None:
        other = (OTHER, HEAD)[node]
        card = self.nodes.cards[node]
        run(*self.nodes.inside(node), "ip", "neigh", verb, other, *how, "dev", card)
