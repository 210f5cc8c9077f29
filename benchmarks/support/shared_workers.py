"""Prefill workers that compute a batch together as threads, over links of limited speed."""

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.channels.base import TensorSpec
from actors.channels.endpoint import Endpoint
from actors.channels.factory import make_endpoint
from actors.gather.group_exchange import GroupCall, GroupExchange
from actors.gather.shared_cache import GroupHalf
from actors.gather.shared_pass import SharedPass
from actors.telemetry.telemetry import Timeline
from contracts.clock import monotonic_s
from contracts.config import ChannelConfig
from contracts.placement import Placement
from kernels.steps import run_to_end
from models.decoder.divided_heads import divided_half, head_share
from models.experts.expert_half import ExpertHalf, RoutedTokens
from models.weights.checkpoint import Checkpoint
from tests.support.local_model import LocalModel

BLOCK_TOKENS = 16


class LimitedLink:
    """Makes each sender wait as if its packets went over a link of this speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._reserve = bytes_per_s, Endpoint.reserve
        self._free_s: dict[str, float] = {}
        self.sent_bytes = 0

    def reserve(self, endpoint: Endpoint, peer: str, parts: Sequence[TensorSpec]) -> Any:
        size = sum(part.num_bytes for part in parts)
        self.sent_bytes += size
        free_s = max(time.monotonic(), self._free_s.get(endpoint.name, 0.0))
        self._free_s[endpoint.name] = free_s + size / self._bytes_per_s
        time.sleep(max(0.0, self._free_s[endpoint.name] - time.monotonic()))
        return self._reserve(endpoint, peer, parts)


class SharedWorkers:
    """Workers over shared memory, with any placement."""

    def __init__(self, folder: Path, model: LocalModel, placement: Placement) -> None:
        checkpoint, workers = Checkpoint(folder), placement.ranks
        shares = tuple(head_share(model.spec, rank, workers) for rank in range(workers))
        names, addresses = [f"prefill-{rank}" for rank in range(workers)], dict[str, str]()
        token, config = secrets.token_bytes(32), ChannelConfig(backend="shm", spin_s=0.0)
        dtype, device = model.attention.dtype, torch.device("cpu")
        self.exchanges: list[GroupExchange] = []
        self._halves: list[GroupHalf] = []
        for rank, name in enumerate(names):
            endpoint = make_endpoint(
                name=name, token=token, epoch=1, config=config, clock=monotonic_s, device=device
            )
            addresses[name] = endpoint.listen()
            own = ExpertHalf.load(checkpoint, model.spec, placement.experts_of(rank), dtype=dtype)
            exchange = GroupExchange(endpoint, names, own, placement, Timeline(0))
            self.exchanges.append(exchange)
            half = divided_half(model.attention, checkpoint, shares[rank], exchange.total)
            slices = partial(ExpertHalf.load_slices, checkpoint, model.spec, rank, workers, dtype)
            self._halves.append(GroupHalf(half, shares, BLOCK_TOKENS, functools.cache(slices)))
        for exchange in self.exchanges:
            exchange.join(addresses)

    @property
    def copies(self) -> int:
        return sum(exchange.counts.copies for exchange in self.exchanges)

    def run(self, call: GroupCall, number: int) -> float:
        """Return the seconds of a pass."""
        return self._run(lambda rank: self._pass(rank, call), number)

    def run_experts(self, layer: int, routed: Sequence[RoutedTokens], number: int) -> float:
        """Return the seconds of a layer's experts, with tokens of each worker."""
        pairs = zip(self.exchanges, routed, strict=True)
        sums = [exchange.sums(layer, rows) for exchange, rows in pairs]
        return self._run(lambda rank: run_to_end(sums[rank]), number)

    def _run(self, work: Callable[[int], object], number: int) -> float:
        """Return the seconds of some work on each worker at once."""

        def run(rank: int) -> None:
            exchange = self.exchanges[rank]
            exchange.begin(number)
            while not exchange.is_linked:
                exchange.receive(0.1)
            work(rank)
            exchange.end()

        start_s, ranks = time.monotonic(), range(len(self.exchanges))
        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start_s

    def close(self) -> None:
        for exchange in self.exchanges:
            exchange._endpoint.close()

    def _pass(self, rank: int, call: GroupCall) -> None:
        shared = SharedPass(self.exchanges[rank], self._halves[rank], call, 0)
        for layer in range(shared.layers):
            run_to_end(shared.steps(layer))
