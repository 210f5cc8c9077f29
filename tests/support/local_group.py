"""An attention/expert group, prefill workers, or both, as local processes without Ray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from typing import NamedTuple

import msgspec

from actors.channels.handshake import new_token
from actors.ranks.expert_resize import RunningRank, place_experts
from actors.ranks.rendezvous import (
    GroupSpec,
    Seat,
    contiguous_placements,
    form_group,
    introduce,
    make_specs,
)
from contracts.config import TandemConfig
from contracts.hardware import Hardware
from contracts.placement import Placement
from contracts.ranks import Group, RankReady, RankSpec, RankStatus, rank_names
from tests.support.rank_process import RankProcess

STOP_TIMEOUT_S = 5.0


class RankLocation(NamedTuple):
    """host: address on which the rank listens. inside: argument of `RankProcess`."""

    host: str = "127.0.0.1"
    inside: Sequence[str] = ()


class LocalGroup:
    """Context manager of a running group. ready: attention ranks first. processes: by name."""

    def __init__(
        self,
        model_folder: str,
        config: TandemConfig,
        *,
        backend: str = "shm",
        device: str = "cpu",
        planner: bool = False,
        hardware: Hardware | None = None,
        placements: Mapping[Group, Placement] | None = None,
        locations: Mapping[str, RankLocation] | None = None,
    ) -> None:
        """planner: start one, whose first costs are `hardware`. placements: None: contiguous."""
        groups = config.groups
        if placements is None:
            placements = contiguous_placements(
                model_folder, expert_ranks=groups.expert_ranks, prefill_ranks=groups.prefill_ranks
            )
        self.token = new_token()
        group_spec = GroupSpec(config, model_folder, self.token, 1, backend, hardware, placements)
        seat = Seat(device, "127.0.0.1", groups.attention_ranks + groups.prefill_ranks)
        attention, expert = [seat] * groups.attention_ranks, [seat] * groups.expert_ranks
        prefill = [seat] * groups.prefill_ranks
        planners = [Seat("cpu", "127.0.0.1", 1)] if planner else []
        self._locations = locations or {}
        self._specs = [
            msgspec.structs.replace(spec, host=self._locations.get(spec.name, RankLocation()).host)
            for spec in make_specs(group_spec, attention, expert, planners, prefill)
        ]
        self._epoch, self._config = group_spec.epoch, config
        self._lock = threading.Lock()  # guards the epoch and who is ready
        self._timeout_s = groups.ready_timeout_s
        self.processes: dict[str, RankProcess] = {}
        self.ready: list[RankReady] = []

    def __enter__(self) -> LocalGroup:
        try:
            for spec in self._specs:
                self.processes[spec.name] = self._started(spec.name)
            handles = list(self.processes.values())
            self.ready = form_group(self._specs, handles, timeout_s=self._timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replace(self, *names: str, without: Callable[[], Collection[str]] = tuple) -> int:
        """Kill processes, start others in their places, and return their epoch.

        without: others that are lost by then. Thread-safe for different names.
        """
        with self._lock:
            self._epoch += 1
            epoch = self._epoch
        for name in names:
            self.processes[name].send_signal(signal.SIGKILL)
            self.processes[name].close()
            self.processes[name] = self._started(name)
        lost = [spec for spec in self._specs if spec.name in names]
        specs = [msgspec.structs.replace(spec, epoch=epoch) for spec in lost]
        handles = [self.processes[spec.name] for spec in specs]
        started_ranks = form_group(
            specs,
            handles,
            timeout_s=self._timeout_s,
            others=lambda: [one for one in self.ready if one.name not in {*names, *without()}],
            allow_unreachable=True,
        )
        with self._lock:
            by_name = {ready.name: ready for ready in (*self.ready, *started_ranks)}
            self.ready = [by_name[spec.name] for spec in self._specs]
        self.introduce(without())
        return epoch

    def introduce(self, without: Collection[str] = ()) -> None:
        """Send all ranks but those the addresses of each other."""
        ready = [one for one in self.ready if one.name not in without]
        introduce(ready, {one.name: self.processes[one.name] for one in ready})

    def resize_experts(self, expert_ranks: int) -> None:
        """Change the number of expert ranks. Raises as `form_group` and `place_experts`."""
        started = self.start_experts(expert_ranks)
        try:
            place_experts(self.working, expert_ranks, self._config)
        except BaseException:
            self._end(*started)
            raise
        names = rank_names(Group.EXPERT, expert_ranks)
        self._end(*(s.name for s in self._specs if s.group is Group.EXPERT and s.name not in names))

    def start_experts(self, expert_ranks: int) -> list[str]:
        """Start missing expert ranks and return their names. Raises as `form_group`."""
        ranks = enumerate(rank_names(Group.EXPERT, expert_ranks))
        specs = [self._spec_of(rank) for rank, name in ranks if name not in self.processes]
        names = [spec.name for spec in specs]
        self._epoch += bool(specs)
        try:
            handles = [self.processes.setdefault(name, self._started(name)) for name in names]
            others = self.ready
            ready = form_group(specs, handles, timeout_s=self._timeout_s, others=lambda: others)
        except BaseException:
            self._end(*names)
            raise
        self._specs, self.ready = [*self._specs, *specs], [*others, *ready]
        return names

    def working(self) -> list[RunningRank]:
        """Return the ranks for `place_experts`."""
        handles = self.processes
        return [RunningRank(ready, handles[ready.name]) for ready in self.ready]

    def _spec_of(self, rank: int) -> RankSpec:
        """Return the spec of an expert rank that is added later."""
        spec = next(spec for spec in self._specs if spec.group is Group.EXPERT)
        return msgspec.structs.replace(spec, rank=rank, epoch=self._epoch + 1)

    def _end(self, *names: str) -> None:
        self._specs = [spec for spec in self._specs if spec.name not in names]
        self.ready = [ready for ready in self.ready if ready.name not in names]
        for process in [self.processes.pop(name) for name in names if name in self.processes]:
            process.call("stop")
            process.close()

    @property
    def client_addresses(self) -> dict[str, str]:
        """Return the addresses of attention ranks and prefill workers by name."""
        return {
            ready.name: ready.client_address
            for spec, ready in zip(self._specs, self.ready, strict=True)
            if spec.group in (Group.ATTENTION, Group.PREFILL)
        }

    def status(self, timeout_s: float = 10.0) -> list[RankStatus]:
        """Return the status of each rank but the planner."""
        futures = [rank.call("status") for rank in self._ranks]
        return [future.result(timeout_s) for future in futures]

    def rank_status(self, name: str) -> RankStatus:
        status: RankStatus = self.processes[name].call("status").result(5.0)
        return status

    def metrics(self, timeout_s: float = 10.0) -> dict[str, str]:
        """Return the Prometheus text of each process by name."""
        futures = [(name, process.call("metrics")) for name, process in self.processes.items()]
        return {name: future.result(timeout_s) for name, future in futures}

    def _started(self, name: str) -> RankProcess:
        return RankProcess(name, inside=self._locations.get(name, RankLocation()).inside)

    @property
    def _ranks(self) -> list[RankProcess]:
        return [self.processes[s.name] for s in self._specs if s.group is not Group.PLANNER]

    def close(self) -> None:
        """Stop all ranks at once, then end them."""
        stopping = [process.call("stop") for process in self.processes.values()]
        wait(stopping, timeout=STOP_TIMEOUT_S)
        for process in self.processes.values():
            process.close()
