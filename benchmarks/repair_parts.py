"""What a layer of a micro-batch, and an expert rank's look, cost with repair and without, by
themselves: the planes of `benchmarks.repair_cost` on a wire that answers at once, in one
process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from actors.channels.base import Endpoint, Header, Packet, PacketKind, TensorSpec
from actors.moe.backend import TaskKey
from actors.moe.remote_backend import RemoteBackend
from actors.rebalance.expert_generations import PlacementMessage
from actors.rebalance.expert_rebalancer import ExpertRebalancer
from actors.rebalance.placement_client import PlacementClient
from actors.rebalance.placement_messages import PlacementSender
from actors.telemetry.timeline import Timeline
from benchmarks.unrepaired_rank import UnrepairedBackend, UnrepairedClient, experts_look
from contracts.plan import Plan
from contracts.requests import Priority
from models.experts.router import RoutedTokens
from planner.placement.slots import contiguous

RANKS, EXPERTS, TOP_K, MODEL_DIM, LAYERS = 2, 16, 2, 256, 8
TOKENS = (1, 8, 64)
ROUNDS, LAYERS_A_ROUND, LOOKS_A_ROUND = 60, 400, 4000
NAMES = tuple(f"expert-{rank}" for rank in range(RANKS))
PLACEMENT = contiguous(EXPERTS, RANKS, num_layers=LAYERS, moe_layers=tuple(range(LAYERS)))


class Answered:
    """An endpoint whose peers answer A2E with zeros, at once; what else is said to one comes back
    as if it had said it."""

    name, epoch, backend = "attention-0", 1, "shm"

    def __init__(self) -> None:
        self._came: list[Packet] = []
        self._memory: dict[tuple[str, Sequence[TensorSpec]], SimpleNamespace] = {}

    def peers(self) -> Sequence[str]:
        return NAMES

    def reserve(self, peer: str, parts: Sequence[TensorSpec]) -> SimpleNamespace:
        """The same memory for the same parts."""
        key = peer, tuple(parts)
        if key not in self._memory:
            tensors = [torch.zeros(part.shape, dtype=part.torch_dtype) for part in parts]
            answer = [torch.zeros_like(tensors[0])]
            self._memory[key] = SimpleNamespace(peer=peer, tensors=tensors, answer=answer)
        return self._memory[key]

    def commit(self, reservation: SimpleNamespace, header: Header) -> None:
        tensors = reservation.tensors
        if header.kind is PacketKind.A2E:
            header, tensors = _answer(header), reservation.answer
        self._came.append(Packet(reservation.peer, header, tensors, time.monotonic(), None))

    def poll(self, timeout_s: float) -> list[Packet]:
        came, self._came = self._came, []
        return came


def _answer(header: Header) -> Header:
    return Header(
        PacketKind.E2A,
        header.epoch,
        header.batch,
        header.layer,
        header.micro_batch,
        header.token_group,
        header.priority,
        header.sent_s,
        header.generation,
    )


def parts_us() -> dict[str, dict[str, float]]:
    """Of each part the medians of both sides and of what repair adds, in microseconds."""
    found = {}
    for tokens in TOKENS:
        sides = {
            "with": _layers(tokens, RemoteBackend, PlacementClient),
            "without": _layers(tokens, UnrepairedBackend, UnrepairedClient),
        }
        name = f"attention rank: a layer of a micro-batch of {tokens} tokens"
        found[name] = _in_turns(sides, LAYERS_A_ROUND)
    moving = _moving()
    sides = {"with": _looks(moving.poll), "without": _looks(lambda: experts_look(moving))}
    found["expert rank: a look"] = _in_turns(sides, LOOKS_A_ROUND)
    return found


def _layers(
    tokens: int, plane_of: type[RemoteBackend], following_of: type[PlacementClient]
) -> Callable[[], None]:
    """A round of layers: dispatched, answered, added up."""
    endpoint = cast(Endpoint, Answered())
    following = following_of(
        endpoint,
        PLACEMENT,
        deadline_s=60.0,
        check=lambda placement: None,
        clock=time.monotonic,
    )
    timeline = Timeline(0, lambda span: None)
    backend = plane_of(
        endpoint, following.slots, NAMES, timeline, time.monotonic, following=following
    )
    for name in NAMES:
        following.joined(name)
        PlacementSender(endpoint, time.monotonic).send(
            PlacementMessage(name, PacketKind.READY, 0), PLACEMENT
        )
    backend.poll(0.0, idle=False)
    assert not following.absent
    random = torch.Generator().manual_seed(1)
    hidden_TD = torch.zeros(tokens, MODEL_DIM)
    ids_TK = torch.rand(tokens, EXPERTS, generator=random).topk(TOP_K).indices
    routed = RoutedTokens(torch.zeros(tokens, MODEL_DIM), ids_TK, torch.full((tokens, TOP_K), 0.5))
    keys = [TaskKey(1, layer, 0, Priority.LS, True) for layer in range(LAYERS)]

    def run() -> None:
        for number in range(LAYERS_A_ROUND):
            pending = backend.dispatch(keys[number % LAYERS], hidden_TD, routed, Plan())
            while not pending.is_complete:
                backend.poll(0.0, idle=False)
            for _ in backend.combine(hidden_TD, pending, None):
                pass

    return run


def _moving() -> ExpertRebalancer[Any]:
    """An expert rank's, that nobody wants anything of."""
    store: Any = SimpleNamespace(count=EXPERTS, holds=lambda generation: True)
    loader: Any = SimpleNamespace()
    endpoint = cast(Endpoint, Answered())
    return ExpertRebalancer(
        endpoint, PLACEMENT, store, loader, loader, deadline_s=60.0, clock=time.monotonic
    )


def _looks(poll: Callable[[], Iterable[int]]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(LOOKS_A_ROUND):
            poll()

    return run


def _in_turns(sides: dict[str, Callable[[], None]], each: int) -> dict[str, float]:
    """Processor time of one of a round's `each`, in microseconds."""
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-2, ROUNDS):
        for side in sides if number % 2 else reversed(sides):
            begun_ns = time.thread_time_ns()
            sides[side]()
            if number >= 0:
                samples[side].append((time.thread_time_ns() - begun_ns) / 1000 / each)
    medians = {side: statistics.median(times) for side, times in samples.items()}
    added = [with_ - out for with_, out in zip(samples["with"], samples["without"], strict=True)]
    return {**medians, "added": statistics.median(added)}
