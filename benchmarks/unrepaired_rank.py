"""A rank's process that does without repair when a signal tells it to: benchmarks/repair_cost.py.

What a rank does in each layer and each look so that its group can be repaired is left out then, in
the words of the commit before there was repair: rows are not held until they are answered, nobody
asks whether a rank can be sent anything, or whether others stand in, or adopts what was wanted. It
is the same process with and without: of two that run the same code one took 5 % more of a core.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from torch import Tensor

from actors.channels.base import ChannelEvent, Packet, transfers
from actors.channels.endpoint import BaseEndpoint
from actors.moe.backend import TaskKey
from actors.moe.dispatch import RankSlice, plan_dispatch
from actors.moe.remote_backend import RemoteBackend
from actors.moe.remote_pending import RemotePending
from actors.rebalance.expert_rebalancer import ExpertRebalancer
from actors.rebalance.placement_client import PlacementClient
from contracts.errors import ChannelError
from contracts.plan import Plan
from contracts.traces import Stage, TaskSpan
from models.experts.router import RoutedTokens
from planner.placement.slots import LayerSlots
from planner.schedule.batch_split import token_group_bounds
from tests.support.rank_process import main

WITH, WITHOUT = signal.SIGUSR1, signal.SIGUSR2


class UnrepairedPending(RemotePending):
    """Knows nothing of what it has sent, but how much."""

    __slots__ = ()

    def __init__(
        self, key: TaskKey, slices: Sequence[RankSlice], placed: LayerSlots, generation: int
    ) -> None:
        self.key = key
        self.placed, self.present = placed, generation
        self.slices = slices
        self.replies = {}
        self.missing = len(slices)
        self.sent_s = 0.0
        self.prefetch_s = 0.0


class UnrepairedBackend(RemoteBackend):
    """As it was while the loss of an expert rank was the end of it."""

    def dispatch(
        self, key: TaskKey, hidden_TD: Tensor, routed: RoutedTokens, plan: Plan
    ) -> RemotePending:
        if self._ahead is not None:
            routed = self._ahead.select_routing(key, routed)
        topk_ids_TK = routed.topk_ids_TK.cpu().numpy()
        if self._sample is not None:
            self._sample.routed(key.owner, topk_ids_TK)
        tokens, placed = len(topk_ids_TK), self._placement.layer(key.layer)
        slices = plan_dispatch(
            topk_ids_TK,
            routed.topk_weights_TK.cpu().numpy(),
            token_group_bounds(tokens, plan.r2),
            placed,
        )
        self._counts.add(key.layer, tokens, slices, placed)
        pending = self._pending[key.owner] = UnrepairedPending(
            key, slices, placed, self._generation
        )
        if self._following is not None:
            self._following.begin_layer()
        try:
            for piece in slices:
                pending.sent_s = self._clock()
                self._send_slice(key, piece, routed.x_TD, pending.sent_s)
        except ChannelError:
            self.drop(pending)
            raise
        if self._ahead is not None:
            start_s = self._clock()
            self._ahead.predict_next(key, hidden_TD, routed)
            pending.prefetch_s = self._clock() - start_s
        return pending

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0 or idle:
            channel_events = self._endpoint.poll(timeout_s)
        else:
            start_s = self._clock()
            channel_events = self._endpoint.poll(timeout_s)
            end_s = self._clock()
            self._timeline.add(TaskSpan(self._endpoint.name, Stage.WAIT, start_s, end_s))
            self._timeline.record_wait(start_s, end_s, transfers(channel_events))
        if channel_events:
            self._take(channel_events)
        elif self._pending:
            self._check_replies()
        if self._following is not None:
            self._following.poll()
        return bool(channel_events)


def _attention_looks(self: PlacementClient) -> None:
    self._send(self._generations.poll(self._clock()))
    self._sender.flush()


def experts_look(self: ExpertRebalancer[object]) -> Iterable[int]:
    """`ExpertRebalancer.poll`, as it was."""
    while self._proposed:
        placement, present, within_s = self._proposed.popleft()
        if present is not None and self._machine.under_way is None:
            self._loader.settled(present)
        misfit = self._loader.misfit(placement, resizes=present is not None)
        self._do(self._machine.proposed(placement, self._clock(), misfit, within_s))
    while self._results:
        self._take(self._results.popleft())
    self._do(self._machine.poll(self._clock()))
    self._sender.flush()
    freed, self._freed = self._freed, []
    return freed


def _deliver(self: BaseEndpoint, packet: Packet, channel_events: list[ChannelEvent]) -> None:
    link = self._links.get(packet.peer)
    if packet.header.epoch < self.epoch or link is None:
        packet.release()
        return
    packet.sent_s -= link.clock_offset_s
    channel_events.append(packet)


class UnrepairedClient(PlacementClient):
    poll = _attention_looks


_PARTS = (
    (RemoteBackend, "dispatch", UnrepairedBackend.dispatch),
    (RemoteBackend, "poll", UnrepairedBackend.poll),
    (PlacementClient, "poll", _attention_looks),
    (ExpertRebalancer, "poll", experts_look),
    (BaseEndpoint, "_deliver", _deliver),
)
_AS_THEY_ARE = tuple((owner, name, getattr(owner, name)) for owner, name, _ in _PARTS)


def switch(number: int, _: object) -> None:
    """In this process, from now on, nothing being under way."""
    for owner, name, function in _PARTS if number == WITHOUT else _AS_THEY_ARE:
        setattr(owner, name, function)


if __name__ == "__main__":
    for each in (WITH, WITHOUT):
        signal.signal(each, switch)
    main()
