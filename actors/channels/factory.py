"""Creates the endpoint of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch

from actors.channels.cuda import require_cupy, require_nccl, with_device_index
from actors.channels.endpoint import Endpoint
from actors.channels.ipc import IpcEndpoint
from actors.channels.nccl import NcclEndpoint
from actors.channels.shm import ShmEndpoint
from actors.channels.tcp import TcpEndpoint
from contracts.clock import Clock
from contracts.config import SPIN_S, ChannelConfig
from contracts.errors import ChannelError
from contracts.machine import usable_cores
from contracts.ranks import Group, RankSpec


class EndpointBackend(NamedTuple):
    """memory: device type of the payloads. require: raises ChannelError on an unfit machine."""

    endpoint: type[Endpoint]
    memory: Literal["cpu", "cuda"]
    require: Callable[[], None] = lambda: None


BACKENDS: dict[str, EndpointBackend] = {
    "shm": EndpointBackend(ShmEndpoint, "cpu"),
    "tcp": EndpointBackend(TcpEndpoint, "cpu"),
    "nccl": EndpointBackend(NcclEndpoint, "cuda", require_nccl),
    "ipc": EndpointBackend(IpcEndpoint, "cuda", partial(require_cupy, "ipc")),
}


def spin_seconds(spec: RankSpec, cores: float) -> float:
    """Return channel.spin_s; by default 0 where spinning takes a core from other threads."""
    if spec.config.channel.spin_s is not None:
        return spec.config.channel.spin_s
    is_prefill = spec.group is Group.PREFILL
    ranks = spec.prefill_ranks if is_prefill else spec.attention_ranks + spec.expert_ranks
    ranks = 1 if spec.is_pinned else ranks
    return SPIN_S if ranks * spec.config.groups.torch_threads <= cores else 0.0


def rank_endpoint(spec: RankSpec, device: torch.device, clock: Clock) -> Endpoint:
    """Create the endpoint of a rank. Raises ChannelError."""
    config = spec.config.channel
    spin_s = spin_seconds(spec, usable_cores())
    return make_endpoint(
        name=spec.name,
        token=spec.token,
        epoch=spec.epoch,
        config=msgspec.structs.replace(config, backend=spec.backend, spin_s=spin_s),
        clock=clock,
        device=device,
        placement=spec.placement.digest,
    )


def make_endpoint(
    *,
    name: str,
    token: bytes,
    epoch: int,
    config: ChannelConfig,
    clock: Clock,
    device: torch.device,
    placement: str = "",
) -> Endpoint:
    """Create an endpoint. `config.backend` must not be "auto". Raises ChannelError.

    Checks that this machine and the device are fit for the backend.
    """
    backend = BACKENDS.get(config.backend)
    if backend is None:
        raise ChannelError(
            f"channel.backend={config.backend}: choose {_alternatives(BACKENDS)} before making an "
            "endpoint"
        )
    if device.type != backend.memory:
        others = [key for key, other in BACKENDS.items() if other.memory == device.type]
        raise ChannelError(
            f"channel.backend={config.backend} moves {backend.memory} memory, this rank computes "
            f"on {device}: use {_alternatives(others)}"
        )
    backend.require()
    return backend.endpoint(
        name=name,
        token=token,
        epoch=epoch,
        config=config,
        clock=clock,
        device=with_device_index(device),
        placement=placement,
    )


def _alternatives(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"
