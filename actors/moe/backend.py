"""Expert backends: where the routed experts of a micro-batch are computed.

    dispatch ──> (the backend computes, fetches or waits) ──> is_complete ──> combine

`RemoteBackend` uses expert ranks over A2E and E2A. `StoredBackend`, `CachedBackend` and
`DeviceBackend` compute locally. `LockstepBackend` uses all workers at once (the DP+EP baseline).
Where experts are not all at hand, `ExpertPrefetcher` prefetches those predicted for the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from models.experts.cache_requests import PredictedExpert
from models.experts.device_lanes import Arrival
from models.experts.expert_half import RoutedTokens
from models.prediction.expert_predictor import DevicePrediction, ExpertPredictor, PredictedRouting
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


MicroBatchId = tuple[int, int]
"""Batch, micro-batch."""


class TaskKey(NamedTuple):
    """One layer of one micro-batch. decodes: every sequence has exactly one new token."""

    batch: int
    layer: int
    micro_batch: int
    priority: Priority
    decodes: bool = False

    @property
    def owner(self) -> MicroBatchId:
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
    unusable; any other error ends the batches in flight. stage: of `combine` in the trace; None:
    part of the attention that follows. yields: other tasks may run between the steps of `combine`.
    interleaves: tasks of different batches may alternate.
    """

    fatal: type[ChannelError] = ChannelError
    stage: Stage | None = Stage.EXPERT
    yields = interleaves = True

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


Hint = Callable[[TaskKey, int, Sequence[PredictedExpert]], None]

_MAX_PREDICTED = 64


class PendingPrediction(NamedTuple):
    """A prediction on the device whose expert ids are being copied to the host."""

    found: DevicePrediction
    ids: Arrival


class ExpertPrefetcher:
    """Passes predictions on as hints. Owned by the computing thread.

    predictor: None: nothing is predicted. hint: receives the predicted experts of a later layer.
    forget: cancels a micro-batch's hints.
    """

    def __init__(
        self,
        predictor: ExpertPredictor | None,
        hint: Hint,
        forget: Callable[[MicroBatchId], None] = lambda owner: None,
    ) -> None:
        self.is_enabled = predictor is not None
        self._predictor, self._hint, self._forget = predictor, hint, forget
        self._predicted: dict[MicroBatchId, list[PredictedRouting]] = {}  # of the next layer

    def prepare(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """Predict for a micro-batch that is about to run."""
        if self._predictor is not None:
            self._pass_on(key, self._predictor.predict_first(token_ids_T))

    def select_routing(self, key: TaskKey, routed: RoutedTokens) -> RoutedTokens:
        """Return the experts that the layer runs: as routed, or as predicted (speculation).

        Call `predict_next` afterwards.
        """
        if self._predictor is None:
            return routed
        known = [each for each in self._predicted.pop(key.owner, ()) if each.layer == key.layer]
        for predicted in known:
            self._predictor.update(predicted, routed.topk_ids_TK)
        is_speculated = key.decodes and self._predictor.is_speculated(key.layer)
        if is_speculated and known and known[0].routed is not None:
            return self._predictor.speculate(known[0], routed)
        return routed

    def predict_next(self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens) -> None:
        """Predict while the layer's experts run. hidden_TD: the residual before them."""
        if self._predictor is not None:
            self._pass_on(key, self._predictor.predict(key.layer, hidden_TD, routed))

    def request_prediction(
        self,
        key: TaskKey,
        hidden_TD: Tensor,
        routed: RoutedTokens,
        fetch: Callable[[Tensor], Arrival],
    ) -> PendingPrediction | None:
        """Replace `predict_next` on a device: predict there and copy the ids with `fetch`.

        Pass the result to `deliver` once it has arrived. None: nothing is predicted.
        """
        if self._predictor is None:
            return None
        found = self._predictor.predict_on_device(key.layer, hidden_TD, routed)
        return None if found is None else PendingPrediction(found, fetch(found.routed.topk_ids_TK))

    def deliver(self, key: TaskKey, prediction: PendingPrediction) -> None:
        """Hint the experts of a prediction that has arrived on the host."""
        assert self._predictor is not None
        ids = prediction.ids.tensor.tolist()
        self._pass_on(key, self._predictor.resolve(prediction.found, ids))

    def drop(self, owner: MicroBatchId) -> None:
        if self._predictor is not None:
            self._predicted.pop(owner, None)
            self._forget(owner)

    def _pass_on(self, key: TaskKey, predicted: PredictedRouting | None) -> None:
        if predicted is None or self._predictor is None:
            return
        self._predicted.setdefault(key.owner, []).append(predicted)
        if len(self._predicted) > _MAX_PREDICTED:  # batches dropped during attention
            self.drop(next(iter(self._predicted)))
        self._hint(key, predicted.layer, self._predictor.experts(predicted))
