"""Placement transitions and leases of an expert rank, and their outcomes."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

from actors.channels.base import Packet, PacketKind
from actors.channels.endpoint import Endpoint
from actors.moe.expert_server import PlacementHandler
from actors.moe.rank_experts import CachedExperts, ResidentExperts
from actors.rebalance.expert_loading import ExpertLoader, LoadResult
from actors.rebalance.placement_generations import (
    Action,
    ExpertGenerations,
    PlacementMessage,
    TransitionReport,
)
from actors.rebalance.placement_messages import PlacementSender, attempt_of, placement_of, reason_of
from contracts.clock import Clock
from contracts.logs import event
from contracts.placement import Placement, PlacementState, PlacementUpdate
from contracts.planner_messages import MoveOutcome, PlacementReport
from contracts.requests import Priority
from planner.placement.resize import is_failover

log = logging.getLogger("tandem.experts")

MOST: Final = 64  # leases of one attention rank, including releases that overtook their ACQUIRE


class PlacementLeases:
    """Leases of attention ranks on generations: rules without I/O, threads or a clock.

    `loading` and `needed` name what to load and to keep. Methods return the packets to send, or
    raise ValueError for a rank to be disconnected.
    """

    def __init__(self) -> None:
        self._placements: dict[int, Placement] = {}
        self._by: dict[int, dict[str, int]] = {}  # attempt by generation and holder
        self._owed: dict[str, dict[int, Counter[Priority]]] = {}  # outstanding RELEASE, by holder
        self._committed: dict[str, dict[Priority, int]] = {}  # newest, by holder
        self._unloaded: list[int] = []  # generations in the order of loading

    @property
    def loading(self) -> Placement | None:
        """The placement whose experts are to be loaded."""
        return self._placements[self._unloaded[0]] if self._unloaded else None

    @property
    def needed(self) -> Collection[int]:
        """Generations that attention ranks hold leases of."""
        return self._by.keys()

    def newest(self, above: int) -> Placement | None:
        """Return the newest leased placement of a planner above that generation."""
        found = [one for one in self._by if not is_failover(one) and one > above]
        return self._placements[max(found)] if found else None

    def acquire(
        self, name: str, placement: Placement, attempt: int, *, resident: bool, misfit: str
    ) -> list[PlacementMessage]:
        """Handle ACQUIRE. resident: the experts are loaded. misfit: why not, or empty."""
        generation = placement.generation
        if is_failover(generation):
            self._of(name, generation).update(Priority)
        else:
            self._check_count(name, [one for one, by in self._by.items() if name in by], generation)
        if self._placements.get(generation, placement) != placement:
            misfit = f"another placement is leased as generation {generation}"
        if misfit:
            return [PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=misfit)]
        self._placements[generation] = placement
        self._by.setdefault(generation, {})[name] = attempt
        if resident:
            return self._ready(generation, name)
        if generation not in self._unloaded:
            self._unloaded.append(generation)
        return []

    def loaded(self, generation: int) -> list[PlacementMessage]:
        self._unloaded.remove(generation)
        return self._ready(generation, *sorted(self._by[generation]))

    def failed(self, generation: int, reason: str) -> list[PlacementMessage]:
        self._unloaded.remove(generation)
        del self._placements[generation]
        return [
            PlacementMessage(name, PacketKind.ABORT_VOTE, generation, reason=reason)
            for name in sorted(self._by.pop(generation))
        ]

    def release(self, name: str, generation: int, priority: Priority) -> None:
        if not is_failover(generation):
            return
        owed = self._of(name, generation)
        owed[priority] -= 1
        if not any(owed.values()):
            del self._owed[name][generation]
            self._end(name, [generation])

    def committed(self, name: str, generation: int, priority: Priority) -> None:
        """Handle COMMITTED: the rank uses no planner's generation before that."""
        newest = self._committed.setdefault(name, dict.fromkeys(Priority, 0))
        newest[priority] = max(newest[priority], generation)
        used_from = min(newest.values())
        self._end(name, [one for one in self._by if one < used_from and not is_failover(one)])

    def remove_peer(self, name: str) -> None:
        self._owed.pop(name, None)
        self._committed.pop(name, None)
        self._end(name, list(self._by))

    def _of(self, name: str, generation: int) -> Counter[Priority]:
        owed = self._owed.setdefault(name, {})
        self._check_count(name, owed, generation)
        return owed.setdefault(generation, Counter())

    @staticmethod
    def _check_count(name: str, known: Collection[int], generation: int) -> None:
        if generation not in known and len(known) >= MOST:
            raise ValueError(
                f"{name} holds {len(known) + 1} generations at a time, or releases them before it "
                f"acquires them: {MOST} at most"
            )

    def _ready(self, generation: int, *names: str) -> list[PlacementMessage]:
        by, placement = self._by[generation], self._placements[generation]
        return [
            PlacementMessage(name, PacketKind.READY, generation, by[name], placement=placement)
            for name in names
        ]

    def _end(self, name: str, generations: Iterable[int]) -> None:
        """End the leases of a rank; a generation without leases is not loaded any more."""
        for generation in generations:
            holders = self._by.get(generation, {})
            holders.pop(name, None)
            if generation in self._by and not holders:
                del self._by[generation], self._placements[generation]
                if generation in self._unloaded:
                    self._unloaded.remove(generation)


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


class ExpertRebalancer(PlacementHandler):
    """A `PlacementHandler`: packets, proposals and loads in, packets and reports out."""

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
        self._endpoint, self.store = endpoint, store
        self._loader, self._urgent_loader = loader, urgent_loader
        self._leases = PlacementLeases()
        self.generations = ExpertGenerations(placement, deadline_s)
        self._sender = PlacementSender(endpoint, clock)
        self._clock, self._settled = clock, settled
        self.outcomes = MoveRecorder(endpoint.name, report)
        self._proposed: deque[PlacementUpdate] = deque()
        self._results: deque[tuple[ExpertLoader, LoadResult]] = deque()
        self._in_progress: dict[ExpertLoader, Placement | None] = {}
        self._last: LoadResult | None = None  # of a proposal
        self._held, self._freed = {placement.generation}, list[int]()
        self._settled_generation = placement.generation
        self._is_draining, self._drained_by = False, set[str]()

    @property
    def placement(self) -> Placement:
        """The newest placement that all attention ranks use. Thread-safe."""
        return self.generations.current

    def propose(self, update: PlacementUpdate) -> None:
        """Propose a placement. Thread-safe."""
        self._proposed.append(update)
        self._endpoint.wake()

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

    def handle(self, packet: Packet) -> None:
        header, peer = packet.header, packet.peer
        generation, priority = header.generation, header.priority
        if header.kind is PacketKind.COMMITTED:
            self._leases.committed(peer, generation, priority)
            self._apply()
            self._apply(self.generations.committed(peer, generation, priority))
        elif header.kind is PacketKind.ABORTED:
            reason = reason_of(packet)
            self._apply(self.generations.aborted(peer, generation, header.batch, reason))
        elif header.kind in (PacketKind.ACQUIRE, PacketKind.RELEASE):
            try:
                messages = self._handle_lease(packet)
            except ValueError as error:
                self._endpoint.drop(peer, str(error))
            else:
                self._apply(messages)
        elif header.kind is PacketKind.DRAINING:
            self._drained_by.add(peer)

    def _handle_lease(self, packet: Packet) -> list[PlacementMessage]:
        """Handle ACQUIRE or RELEASE. Raises ValueError for a rank to be disconnected."""
        header = packet.header
        if header.kind is PacketKind.RELEASE:
            self._leases.release(packet.peer, header.generation, header.priority)
            return []
        placement, attempt = placement_of(packet), attempt_of(packet)
        resident = placement.generation in self._held
        misfit = "" if resident else self._urgent_loader.misfit(placement)
        return self._leases.acquire(
            packet.peer, placement, attempt, resident=resident, misfit=misfit
        )

    def announce_drain(self) -> None:
        """Announce to all attention ranks, including later ones, that this rank leaves."""
        self._is_draining = True
        for peer in self._endpoint.peers():
            self._send(peer, PacketKind.DRAINING)

    @property
    def is_drained(self) -> bool:
        """True if no attention rank uses this rank any more."""
        return self._drained_by.issuperset(self._endpoint.peers())

    def add_peer(self, peer: str) -> None:
        self._send(peer, PacketKind.READY, self.placement)
        if self._is_draining:
            self._drained_by.discard(peer)
            self._send(peer, PacketKind.DRAINING)
        self._apply(self.generations.add_peer(peer))

    def remove_peer(self, peer: str) -> None:
        self._leases.remove_peer(peer)
        self._apply()
        self._apply(self.generations.remove_peer(peer))

    def poll(self) -> Iterable[int]:
        while self._proposed:
            update = self._proposed.popleft()
            present, resizes = update.present, update.present is not None
            if present is not None and self.generations.under_way is None:
                self._loader.on_commit(present)
            misfit = self._loader.misfit(update.placement, resizes=resizes)
            now_s, within_s = self._clock(), update.within_s
            self._apply(self.generations.proposed(update.placement, now_s, misfit, within_s))
        while self._results:
            self._take(*self._results.popleft())
        overdue = self.generations.poll(self._clock())
        if overdue:
            self._apply(overdue)
        self._sender.flush()
        freed, self._freed = self._freed, []
        return freed

    def close(self) -> None:
        self._loader.close()
        self._urgent_loader.close()

    def _send(self, peer: str, kind: PacketKind, placement: Placement | None = None) -> None:
        generation = self.placement.generation
        self._sender.send(PlacementMessage(peer, kind, generation, placement=placement))

    def _apply(self, actions: Iterable[Action] = ()) -> None:
        """Follow the generations and leases after a change, which returned `actions`.

        A generation that attention ranks use here becomes the current one, once committed.
        """
        self.generations.abandon(self._leases.needed)
        self._carry_out(actions)
        leased = self._leases.newest(self.placement.generation)
        if leased is not None and leased.generation in self._held:
            self._carry_out(self.generations.adopt(leased))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        self._load_and_free()
        for action in actions:
            if isinstance(action, PlacementMessage):
                self._sender.send(action)
            else:
                self.outcomes.record(action, self._last)

    def _load_and_free(self) -> None:
        """Stop, free and begin to load what the generations and leases need."""
        wanted = {
            self._loader: self.generations.loading,
            self._urgent_loader: self._leases.loading,
        }
        changed = [loader for loader in wanted if wanted[loader] != self._in_progress.get(loader)]
        for loader in changed:
            loader.stop()
        needed = {*self.generations.needed, *self._leases.needed}
        for generation in sorted(self._held - needed):
            self.store.free(generation)
            self._held.discard(generation)
            self._freed.append(generation)
        if self._settled_generation != self.placement.generation:
            self._settled_generation = self.placement.generation
            self._loader.on_commit(self.placement)
            self._settled()
        for loader in changed:
            self._begin(loader, wanted[loader])

    def _begin(self, loader: ExpertLoader, placement: Placement | None) -> None:
        self._in_progress[loader] = placement
        if placement is None:
            return
        if loader is self._loader:
            self._last = None
            name, generation = self._endpoint.name, placement.generation
            event(log, "expert_move_started", rank=name, generation=generation)
        loader.begin(placement, partial(self._on_loaded, loader))

    def _on_loaded(self, loader: ExpertLoader, result: LoadResult) -> None:
        """Keep a result for `poll`. Called on any thread."""
        self._results.append((loader, result))
        self._endpoint.wake()

    def _take(self, loader: ExpertLoader, result: LoadResult) -> None:
        rules = self._leases if loader is self._urgent_loader else self.generations
        generation, loading = result.generation, rules.loading
        if loading is None or generation != loading.generation:
            return  # dropped meanwhile
        self.outcomes.add_result(result)
        if loader is self._loader:
            self._last = result._replace(experts=None)  # the store keeps the experts
        else:
            event(
                log,
                "stand_in_load_failed" if result.experts is None else "stand_in_experts_loaded",
                logging.WARNING,
                rank=self._endpoint.name,
                generation=generation,
                reason=result.reason,
                loaded_bytes=result.loaded_bytes,
                seconds=round(result.seconds, 3),
            )
        if result.experts is None:
            self._apply(rules.failed(generation, result.reason))
            return
        self.store.place(generation, result.experts)
        self._held.add(generation)
        self._apply(rules.loaded(generation))
