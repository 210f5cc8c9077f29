"""A group in the test's own process: real ranks in threads, real channels, and a client."""

from __future__ import annotations

import gc
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from actors.batching.finisher import Finisher
from actors.channels.handshake import Identity, initiate
from actors.moe.rank_experts import ResidentExperts
from actors.ranks.attention_rank import attention_rank
from actors.ranks.expert_rank import ExpertLoop, expert_rank
from actors.ranks.prefill_rank import prefill_rank
from actors.ranks.rank import Rank
from actors.ranks.rendezvous import (
    GroupSpec,
    Seat,
    channel_addresses,
    contiguous_placements,
    make_specs,
)
from actors.ranks.serving_loop import ServingLoop
from contracts.clock import monotonic_s
from contracts.config import TandemConfig
from contracts.loading import config_from
from contracts.messages import Cancel, Event, Events, Failed, Finished, RankState, Scored, Submit
from contracts.messages import Tokens as TokensEvent
from contracts.placement import Placement
from contracts.plan import Plan
from contracts.ranks import Group
from contracts.requests import Sampling
from contracts.routing_messages import WorkerReport, WorkerSnapshot
from kernels.linear import PackedLinear
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from tests.support.tiny_models import VOCABULARY
from tests.support.waiting import wait_until

DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 120.0
_EVENTS = msgspec.msgpack.Decoder(Events)  # made here: two threads at once that make one crash


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of another thread or process holds."""
    wait_until(condition, "it never came true", DEADLINE_S, look_period_s=0.005)


def group_config(attention_ranks: int = 1, expert_ranks: int = 1, **sections: Any) -> TandemConfig:
    """Return a float32 configuration with a small KV pool and these sections."""
    tree: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "groups": {"attention_ranks": attention_ranks, "expert_ranks": expert_ranks},
        "kv": {"pool_tokens": 16 * 512},
        # All ranks share one interpreter lock here, and the machine may be busy: liveness has tests
        # of its own, with a process for each rank.
        "channel": {"heartbeat_timeout_s": 20.0},
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return config_from(tree, source="test")


class ThreadGroup:
    """Context manager of ranks as threads of this process; it leaves no thread or socket."""

    def __init__(
        self,
        folder: Path,
        config: TandemConfig,
        *,
        backend: str = "shm",
        token: bytes | None = None,
        placements: Mapping[Group, Placement] | None = None,
    ) -> None:
        groups = config.groups
        self.token = token or secrets.token_bytes(32)
        if placements is None:
            placements = contiguous_placements(str(folder), expert_ranks=groups.expert_ranks)
        group_spec = GroupSpec(config, str(folder), self.token, 1, backend, placements=placements)
        seat = Seat("cpu", "127.0.0.1", groups.attention_ranks)
        specs = make_specs(
            group_spec, [seat] * groups.attention_ranks, [seat] * groups.expert_ranks
        )
        self._epoch = group_spec.epoch
        self.experts = [expert_rank(s) for s in specs if s.group is Group.EXPERT]
        self.attention = [attention_rank(s) for s in specs if s.group is Group.ATTENTION]
        self._introduce()
        for worker in self.ranks:
            worker.start()

    def _introduce(self) -> None:
        addresses = {
            w.ready.name: w.ready.channel_address for w in self.experts if not w._stopping.is_set()
        }
        for attention_worker in self.attention:
            attention_worker.hooks.connect(addresses)

    def replace(self, name: str) -> Rank:
        """Replace a rank under a new epoch, and connect the new one."""
        self._epoch += 1
        ranks = self.attention if name.startswith("attention") else self.experts
        number = next(n for n, rank in enumerate(ranks) if rank.spec.name == name)
        ranks[number].stop()
        make = attention_rank if ranks is self.attention else expert_rank
        spec = msgspec.structs.replace(ranks[number].spec, epoch=self._epoch)
        ranks[number] = make(spec)
        self._introduce()
        ranks[number].start()
        return ranks[number]

    @property
    def ranks(self) -> list[Rank]:
        return [*self.attention, *self.experts]

    def __enter__(self) -> ThreadGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.ranks:
            worker.stop()

    def join_planner(self, address: str) -> None:
        """Connect all ranks to the planner."""
        for worker in self.ranks:
            worker.hooks.join_planner(address)

    def client(self, rank: int = 0) -> RankConnection:
        worker = self.attention[rank]
        return RankConnection(worker.ready.name, worker.ready.client_address, self.token)

    def pin(self, plan: Plan) -> None:
        for worker in self.attention:
            worker.hooks.pin_plan(plan)


class PrefillThreads:
    """Prefill workers as threads of this process, as `ThreadGroup`."""

    def __init__(
        self,
        folder: Path,
        config: TandemConfig,
        *,
        workers: int = 1,
        backend: str = "shm",
        device: str = "cpu",
        placements: Mapping[Group, Placement] | None = None,
    ) -> None:
        self.token = secrets.token_bytes(32)
        if placements is None:
            placements = contiguous_placements(str(folder), prefill_ranks=workers)
        group_spec = GroupSpec(config, str(folder), self.token, 1, backend, placements=placements)
        seats = [Seat(device, "127.0.0.1", workers)] * workers
        self.workers: list[Rank] = []
        try:
            for spec in make_specs(group_spec, [], [], prefill=seats):
                self.workers.append(prefill_rank(spec))
            addresses = channel_addresses([w.ready for w in self.workers], Group.PREFILL)
            for worker in self.workers:
                worker.hooks.connect(addresses)
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PrefillThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def client(self, rank: int = 0) -> RankConnection:
        ready = self.workers[rank].ready
        return RankConnection(ready.name, ready.client_address, self.token)


def loop_of(worker: Rank) -> ServingLoop:
    """Return the loop of an attention rank or prefill worker."""
    assert isinstance(worker.loop, ServingLoop)
    return worker.loop


def experts_of(worker: Rank) -> ExpertHalf:
    """Return the experts of an expert rank."""
    assert isinstance(worker.loop, ExpertLoop)
    experts = worker.loop.server._experts
    assert isinstance(experts, ResidentExperts)
    (half,) = experts._halves.values()
    return half


def experts_in_memory() -> int:
    """Return the experts in memory, and pairs of other products, that this test made."""
    gc.collect()
    return sum(type(each) is PackedLinear for each in gc.get_objects()) // 2


def half_of(worker: Rank) -> AttentionHalf:
    """Return the half of an attention rank or prefill worker."""
    finisher = loop_of(worker).finisher
    assert isinstance(finisher, Finisher)
    return finisher._half


@contextmanager
def rank_of(kind: str, folder: Path, **prefill: Any) -> Iterator[tuple[Rank, RankConnection]]:
    """Run a rank of kind "attention" or "prefill" (with these settings) and a client of it."""
    if kind == "attention":
        with ThreadGroup(folder, group_config()) as group, group.client() as client:
            yield group.attention[0], client
    else:
        config = prefill_config(prefill={"disable_kv_cache": False, **prefill})
        with PrefillThreads(folder, config) as workers, workers.client() as client:
            yield workers.workers[0], client


@contextmanager
def meeting(worker: Rank, requests: int) -> Iterator[None]:
    """Hold requests submitted inside until all are there, so that they share a batch."""
    loop = loop_of(worker)
    with patch.object(loop.scheduler, "next_batch", return_value=None):
        yield
        end_s = monotonic_s() + DEADLINE_S
        while worker.status().waiting < requests:
            assert monotonic_s() < end_s, "they never came"
            time.sleep(0.001)
    # The loop may have noted a change as tried by now. The rank's own first request may wait too.
    while worker.status().waiting >= requests:
        assert monotonic_s() < end_s, "they were never tried"
        loop._on_compiled()
        time.sleep(0.001)


class RankConnection:
    """Blocking client of one rank. log: reports of a prefill worker."""

    def __init__(self, name: str, address: str, token: bytes) -> None:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        me = Identity(name="test-client", token=token, epoch=None)
        initiate(self._socket, me, purpose="client", to=name, deadline_s=DEADLINE_S)
        self._socket.settimeout(DEADLINE_S)
        self._file = self._socket.makefile("rb")
        self._next_id = 0
        self.events: dict[int, list[Event]] = {}
        self.state: RankState | None = None
        self.log: list[WorkerReport | WorkerSnapshot] = []

    def __enter__(self) -> RankConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, message: Submit | Cancel) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(len(body).to_bytes(4, "little") + body)

    def submit(self, token_ids: Sequence[int], **fields: Any) -> int:
        """Send one sequence; return its request id."""
        self._next_id += 1
        self.events[self._next_id] = []
        fields.setdefault("sampling", None)
        self.send(Submit(request_id=self._next_id, token_ids=list(token_ids), **fields))
        return self._next_id

    def read(self) -> list[Event]:
        """Return the request events of the next frame."""
        size = int.from_bytes(self._exactly(4), "little")
        events = _EVENTS.decode(self._exactly(size)).items
        kept: list[Event] = []
        for event in events:
            if isinstance(event, RankState):
                self.state = event
            elif isinstance(event, WorkerReport | WorkerSnapshot):
                self.log.append(event)
            else:
                self.events[event.request_id].append(event)
                kept.append(event)
        return kept

    def read_until(self, holds: Callable[[], bool]) -> None:
        """Read until the condition holds, with a deadline in spite of heartbeats."""
        end_s = monotonic_s() + ANSWER_DEADLINE_S
        while not holds():
            assert monotonic_s() < end_s, f"{self.state}, {self.events}"
            self.read()

    def wait_started(self, request_id: int) -> None:
        """Wait for the request's first event."""
        self.read_until(lambda: bool(self.events[request_id]))

    def wait(self, *request_ids: int) -> None:
        """Wait until each of the requests has ended."""
        self.read_until(lambda: all(map(self._ended, request_ids)))

    def scored(self, request_id: int) -> Scored:
        self.wait(request_id)
        (event,) = self.events[request_id]
        assert isinstance(event, Scored), event
        return event

    def logits(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Return a row with the candidates' logits for each of the requests."""
        return torch.tensor([self.scored(each).candidate_logits for each in request_ids])

    def last_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return logits of all tokens after each of the sequences."""
        return self.logits([self.submit(ids, candidates=VOCABULARY) for ids in sequences])

    def generated(self, request_id: int) -> tuple[list[int], Finished]:
        self.wait(request_id)
        *tokens, last = self.events[request_id]
        assert isinstance(last, Finished), last
        ids = [i for event in tokens if isinstance(event, TokensEvent) for i in event.token_ids]
        return ids, last

    def failed(self, request_id: int) -> Failed:
        self.wait(request_id)
        event = self.events[request_id][-1]
        assert isinstance(event, Failed), event
        return event

    def _ended(self, request_id: int) -> bool:
        events = self.events[request_id]
        return bool(events) and isinstance(events[-1], Finished | Scored | Failed)

    def _exactly(self, size: int) -> bytes:
        body = self._file.read(size)
        if len(body) < size:
            raise EOFError("the rank closed the connection")
        return body


def connections(addresses: Mapping[str, str], token: bytes) -> list[RankConnection]:
    """Return a client of each rank."""
    return [RankConnection(*item, token) for item in addresses.items()]


def greedy(max_tokens: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)


def prefill_config(**sections: Any) -> TandemConfig:
    """Return `group_config` with a fixed threshold, which saves the reference pass."""
    prefill = {"saturation": 10**12, "max_batch_tokens": 512, **sections.pop("prefill", {})}
    return group_config(prefill=prefill, **sections)
