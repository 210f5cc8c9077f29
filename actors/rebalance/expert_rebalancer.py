"""Placement transitions and leases of an expert rank, and their outcomes."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from actors.channels.base import Packet, PacketKind
from actors.channels.endpoint import Endpoint
from actors.moe.expert_server import PlacementHandler
from actors.moe.rank_experts import CachedExperts, ResidentExperts
from actors.rebalance.expert_generations import (
    Action,
    ExpertGenerations,
    FreeExperts,
    LoadExperts,
    PlacementMessage,
    TransitionReport,
)
from actors.rebalance.expert_loading import ExpertLoader, LoadResult
from actors.rebalance.placement_messages import (
    PlacementLeases,
    PlacementSender,
    attempt_of,
    placement_of,
    reason_of,
)
from contracts.clock import Clock
from contracts.logs import event
from contracts.placement import Placement, PlacementState, PlacementUpdate
from contracts.planner_messages import MoveOutcome, PlacementReport

log = logging.getLogger("tandem.experts")

_FAILURES = 8  # kept


class MoveRecorder:
    """Counts and reports outcomes of moves. failures: latest reasons. Read from any thread."""

    def __init__(self, rank: str, report: Callable[[PlacementReport], None]) -> None:
        self._rank, self._report = rank, report
        self.counts = dict.fromkeys(MoveOutcome, 0)
        self.loaded_bytes, self.load_s = 0, 0.0
        self.failures: dict[int, str] = {}

    def add_result(self, result: LoadResult) -> None:
        self.loaded_bytes += result.loaded_bytes
        self.load_s += result.seconds

    def record(self, report: TransitionReport, result: LoadResult | None) -> None:
        """Record an outcome. result: of the last load."""
        if result is None or result.generation != report.generation:
            result = LoadResult(report.generation, None)
        level = logging.WARNING if report.outcome is MoveOutcome.FAILED else logging.INFO
        self.counts[report.outcome] += 1
        if report.outcome is MoveOutcome.FAILED:
            latest = list(self.failures.items())[1 - _FAILURES :]
            self.failures = dict([*latest, (report.generation, report.reason)])
        event(
            log,
            f"placement_{report.outcome}",
            level,
            rank=self._rank,
            generation=report.generation,
            reason=report.reason,
            loaded_bytes=result.loaded_bytes,
            seconds=round(result.seconds, 3),
        )
        self._report(
            PlacementReport(
                rank=self._rank,
                generation=report.generation,
                outcome=report.outcome,
                reason=report.reason,
                loaded_bytes=result.loaded_bytes,
                seconds=result.seconds,
            )
        )


class _Proposal(NamedTuple):
    """present: the current placement, if the launcher proposes a resize."""

    placement: Placement
    present: Placement | None = None
    within_s: float = 0.0


class ExpertRebalancer(PlacementHandler):
    """A `PlacementHandler`. placement: the newest one that all attention ranks use."""

    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        store: ResidentExperts | CachedExperts,
        loader: ExpertLoader,
        urgent_loader: ExpertLoader,
        *,
        deadline_s: float,
        clock: Clock,
        report: Callable[[PlacementReport], None] = lambda outcome: None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up without transitions. urgent_loader: for leases, on which requests wait."""
        self.placement = placement
        self._endpoint, self.store = endpoint, store
        self._loader, self._urgent_loader = loader, urgent_loader
        self._leases = PlacementLeases()
        self._urgent_results: deque[LoadResult] = deque()
        self.generations = ExpertGenerations(placement.generation, deadline_s)
        self._sender = PlacementSender(endpoint, clock)
        self._clock, self._settled = clock, settled
        self.outcomes = MoveRecorder(endpoint.name, report)
        self._proposed: deque[_Proposal] = deque()
        self._results: deque[LoadResult] = deque()
        self._coming: Placement | None = None
        self._last: LoadResult | None = None
        self._freed: list[int] = []
        self._is_draining, self._drained_by = False, set[str]()

    def propose(self, placement: Placement) -> None:
        """Propose a placement. Thread-safe."""
        self._propose(_Proposal(placement))

    def resize(self, request: PlacementUpdate) -> None:
        """Propose a placement on another number of ranks. Thread-safe."""
        self._propose(_Proposal(request.placement, request.present, request.within_s))

    def placed(self) -> PlacementState:
        """Return the state of the placement. Thread-safe."""
        node, free_bytes = self._loader.room()
        return PlacementState(
            placement=self.placement,
            newest=self.generations.newest,
            under_way=self.generations.under_way,
            failures=self.outcomes.failures,
            expert_bytes=self._loader.expert_bytes,
            free_bytes=free_bytes,
            node=node,
            links=self.generations.links,
        )

    def _propose(self, proposed: _Proposal) -> None:
        self._proposed.append(proposed)
        self._endpoint.wake()

    def handle(self, packet: Packet) -> None:
        header = packet.header
        if header.kind is PacketKind.COMMITTED:
            generation, priority = header.generation, header.priority
            self._do_leases(self._leases.committed(packet.peer, generation, priority))
            self._do(self.generations.committed(packet.peer, generation, priority))
        elif header.kind is PacketKind.ABORTED:
            reason = reason_of(packet)
            self._do(self.generations.aborted(packet.peer, header.generation, header.batch, reason))
        elif header.kind is PacketKind.ACQUIRE:
            self._acquire_lease(packet)
        elif header.kind is PacketKind.RELEASE:
            self._release_lease(packet)
        elif header.kind is PacketKind.DRAINING:
            self._drained_by.add(packet.peer)

    def announce_drain(self) -> None:
        """Announce to all attention ranks, including later ones, that this rank leaves."""
        self._is_draining = True
        for peer in self._endpoint.peers():
            self._sender.send(
                PlacementMessage(peer, PacketKind.DRAINING, self.placement.generation)
            )

    @property
    def is_drained(self) -> bool:
        """True if no attention rank uses this rank any more."""
        return self._drained_by.issuperset(self._endpoint.peers())

    def add_peer(self, peer: str) -> None:
        self._sender.send(
            PlacementMessage(peer, PacketKind.READY, self.placement.generation), self.placement
        )
        if self._is_draining:
            self._drained_by.discard(peer)
            self._sender.send(
                PlacementMessage(peer, PacketKind.DRAINING, self.placement.generation)
            )
        self._do(self.generations.add_peer(peer))

    def remove_peer(self, peer: str) -> None:
        self._do_leases(self._leases.remove_peer(peer))
        self._do(self.generations.remove_peer(peer))

    def poll(self) -> Iterable[int]:
        while self._proposed:
            placement, present, within_s = self._proposed.popleft()
            if present is not None and self.generations.under_way is None:
                self._loader.on_commit(present)
            misfit = self._loader.misfit(placement, resizes=present is not None)
            self._do(self.generations.proposed(placement, self._clock(), misfit, within_s))
        while self._results:
            self._take(self._results.popleft())
        while self._urgent_results:
            self._take_urgent(self._urgent_results.popleft())
        self._adopt()
        self._do(self.generations.poll(self._clock()))
        self._sender.flush()
        freed, self._freed = self._freed, []
        return freed

    def close(self) -> None:
        self._loader.close()
        self._urgent_loader.close()

    # --- leases

    def _acquire_lease(self, packet: Packet) -> None:
        peer = packet.peer
        try:
            placement, attempt = placement_of(packet), attempt_of(packet)
            resident = self.store.holds(placement.generation)
            misfit = "" if resident else self._urgent_loader.misfit(placement)
            request = self._leases.acquire(
                peer, placement, attempt, resident=resident, misfit=misfit
            )
        except ValueError as error:
            self._endpoint.drop(peer, str(error))
            return
        self._do_leases(request)

    def _release_lease(self, packet: Packet) -> None:
        header = packet.header
        try:
            left = self._leases.release(packet.peer, header.generation, header.priority)
        except ValueError as error:
            self._endpoint.drop(packet.peer, str(error))
            return
        self._do_leases(left)

    def _take_urgent(self, result: LoadResult) -> None:
        generation = result.generation
        if generation != self._leases.loading:
            return  # the lease was released
        self.outcomes.add_result(result)
        event(
            log,
            "stand_in_experts_loaded" if result.experts is not None else "stand_in_load_failed",
            logging.WARNING,
            rank=self._endpoint.name,
            generation=generation,
            reason=result.reason,
            loaded_bytes=result.loaded_bytes,
            seconds=round(result.seconds, 3),
        )
        if result.experts is None:
            self._do_leases(self._leases.failed(generation, result.reason))
            return
        self.store.place(generation, result.experts)
        self._do_leases(self._leases.loaded(generation))

    def _do_leases(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, PlacementMessage):
                is_there = action.kind is PacketKind.READY
                placed = self._leases.placement(action.generation) if is_there else None
                self._sender.send(action, placed)
            elif isinstance(action, LoadExperts):
                done = partial(self._on_loaded, self._urgent_results)
                self._urgent_loader.begin(action.placement, done)
            elif isinstance(action, FreeExperts):
                self._free_unleased(action.generation)
        self._adopt()

    def _free_unleased(self, generation: int) -> None:
        """Free a released generation, unless it is proposed or in use."""
        if not self.store.holds(generation):
            self._urgent_loader.stop()
            return
        self._do(self.generations.abandon(generation))
        if generation not in (self.generations.current, self.generations.under_way):
            self._free_generation(generation)

    def _adopt(self) -> None:
        """Make the generation that attention ranks use here the current one, once committed."""
        newest = self._leases.newest(self.generations.current)
        if newest is None or not self.store.holds(newest.generation):
            return
        if self.generations.under_way is None:
            self._coming = newest
            self._do(self.generations.adopt(newest))

    def _free_generation(self, generation: int) -> None:
        if self.store.holds(generation):
            self.store.free(generation)
            self._freed.append(generation)

    # --- proposals

    def _take(self, result: LoadResult) -> None:
        if result.generation != self.generations.under_way:
            return  # dropped meanwhile
        self._last = result._replace(experts=None)  # the store keeps the experts
        self.outcomes.add_result(result)
        if result.experts is None:
            self._do(self.generations.failed(result.generation, result.reason))
            return
        self.store.place(result.generation, result.experts)
        self._do(self.generations.loaded(result.generation))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, PlacementMessage):
                placed = self._coming if action.kind is PacketKind.PREPARED else None
                self._sender.send(action, placed)
            elif isinstance(action, LoadExperts):
                self._load(action.placement)
            elif isinstance(action, FreeExperts):
                self._free(action.generation)
            else:
                self.outcomes.record(action, self._last)

    def _load(self, placement: Placement) -> None:
        self._coming, self._last = placement, None
        event(log, "expert_move_started", rank=self._endpoint.name, generation=placement.generation)
        self._loader.begin(placement, partial(self._on_loaded, self._results))

    def _on_loaded(self, results: deque[LoadResult], result: LoadResult) -> None:
        results.append(result)
        self._endpoint.wake()

    def _free(self, generation: int) -> None:
        if not self._leases.needs(generation):
            self._free_generation(generation)
        if generation != self.placement.generation:  # the next generation was aborted
            self._loader.stop()
            self._coming = None
        elif self._coming is not None:
            self.placement, self._coming = self._coming, None
            self._loader.on_commit(self.placement)
            self._settled()
