"""Expert backends: where the routed experts of a micro-batch are computed.

    dispatch ──> (the backend computes, fetches or waits) ──> is_complete ──> combine

`RemoteBackend` uses expert ranks over A2E and E2A. `StoredBackend`, `CachedBackend` and
`DeviceBackend` compute locally. `LockstepBackend` uses all workers at once (the DP+EP baseline).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from actors.channels.base import Packet, PeerLost
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.requests import Priority
from contracts.traces import Stage
from kernels.steps import Steps
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.layer_decoder import LayerDecoder
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import ExpertPlacement


class MissingRank(NamedTuple):
    """An expert rank without the current generation's experts. epoch: of the lost process."""

    reason: str
    epoch: int
    since_s: float
    is_lost: bool


class Topology(NamedTuple):
    """One state of the expert ranks; replaced, never changed.

    experts: names by rank number, including ranks that are no longer used. unreachable: ranks
    that cannot serve `slots`. has_unused: leases can be released. missing: by name.
    """

    generation: int
    slots: ExpertPlacement
    experts: tuple[str, ...]
    unreachable: frozenset[int] = frozenset()
    has_unused: bool = False
    missing: tuple[tuple[str, MissingRank], ...] = ()


class TopologySource:
    """Follows the expert ranks on behalf of a remote backend. Owned by the backend's thread.

    By default nothing changes, and the loss of a rank ends the backend. replaces: a lost rank's
    experts return, here or elsewhere.
    """

    replaces = False

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def poll(self) -> None:
        """Send due messages; replace `topology` if it has changed."""

    def handle(self, packet: Packet) -> None: ...

    def add_peer(self, expert: str) -> None: ...

    def remove_peer(self, lost: PeerLost) -> None: ...

    def begin_layer(self) -> int:
        """Return the generation that the layer uses, for `end_layer`."""
        return self.topology.generation

    def end_layer(self, generation: int) -> None: ...

    def release_unused(self, in_use: Collection[int]) -> None:
        """Release leases of generations that are not in `in_use`."""


class TaskKey(NamedTuple):
    """One layer of one micro-batch. decodes: every sequence has exactly one new token."""

    batch: int
    layer: int
    micro_batch: int
    priority: Priority
    decodes: bool = False

    @property
    def owner(self) -> tuple[int, int]:
        """The micro-batch: (batch, micro-batch)."""
        return self.batch, self.micro_batch


class PendingExperts(Protocol):
    """Handle that `dispatch` returns and `combine` consumes."""

    @property
    def is_complete(self) -> bool:
        """True if `combine` would not wait."""


class WholeBatch(NamedTuple):
    """A batch in one micro-batch. counts: rows of each sequence in the last layer; None: all."""

    slices: Sequence[SequenceSlice]
    counts: list[int] | None
    batch: AttentionBatch
    kv: KvPool


class SharedLayers(Protocol):
    """A batch whose layers several workers compute together, to the last one."""

    def steps(self, layer: int, hidden_TD: Tensor | None) -> Steps[Tensor]:
        """Compute a layer and return its residual. hidden_TD: that of the layer before.

        Raises PeerError if a worker is lost: this layer is computed without others.
        """

    def close(self) -> None:
        """Release the other workers. May be called twice."""


P = TypeVar("P", bound=PendingExperts)


class ExpertBackend(Generic[P]):
    """Base class of expert backends, with the defaults of one that computes locally.

    Owned by the executor's thread, except for `wake`. An error of kind `fatal` makes the backend
    unusable; any other error ends the batches in flight.
    """

    @property
    def fatal(self) -> type[ChannelError]:
        return ChannelError

    @property
    def stage(self) -> Stage | None:
        """Stage of `combine` in the trace; None: part of the attention that follows."""
        return Stage.EXPERT

    @property
    def yields(self) -> bool:
        """True if other tasks may run between the steps of `combine`."""
        return True

    @property
    def interleaves(self) -> bool:
        """True if tasks of different batches may alternate."""
        return True

    @property
    def copy_s(self) -> float:
        """Measured seconds to copy one layer's weights; 0 if they are not copied."""
        return 0.0

    @property
    def is_engaged(self) -> bool:
        """True while the backend computes for other workers, so that no batch may start."""
        return False

    def disengage(self, waiting_tokens: int) -> None:
        """End computing for other workers, soon, if they can go on without this one."""

    def layer_decoder(self, kv: KvPool) -> LayerDecoder | None:
        """Return what runs several layers of a decode batch at once; None: layers are tasks."""
        return None

    def share(self, whole: WholeBatch, layer: int) -> SharedLayers | None:
        """Return the rest of a batch, from a layer, if other workers compute it with this one."""
        return None

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """Announce a micro-batch that is about to run; key.layer is 0. Raises ChannelError."""

    def dispatch(self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan) -> P:
        """Start the experts of a layer; at most one layer of each micro-batch at a time.

        hidden_TD: the residual to which `combine` adds the result. Raises ChannelError.
        """
        raise NotImplementedError

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        """Receive what has arrived, waiting up to timeout_s; return True if anything did.

        idle: no batch in flight needs the result. Raises ChannelError.
        """
        raise NotImplementedError

    def combine(self, hidden_TD: Tensor, pending: P, shared_TD: Tensor | None) -> Steps[None]:
        """Add the experts' sum and the shared expert to the residual, in place.

        Resources of `pending` are released at the last step. Raises ChannelError.
        """
        raise NotImplementedError

    def drop(self, pending: P) -> None:
        """Discard a layer whose batch failed or was preempted, before `combine` ends."""

    def wake(self) -> None:
        """End a waiting `poll`. Thread-safe."""
