"""The endpoint of a backend."""

from __future__ import annotations

import msgspec
import torch

from actors.channels.base import Endpoint
from actors.channels.cuda import indexed, require_cupy, require_nccl
from actors.channels.endpoint import BaseEndpoint
from actors.channels.ipc import IpcEndpoint
from actors.channels.nccl import NcclEndpoint
from actors.channels.shm import ShmEndpoint
from actors.channels.tcp import TcpEndpoint
from contracts.clock import Clock
from contracts.config import SPIN_S, ChannelConfig
from contracts.errors import ChannelError
from contracts.machine import usable_cores
from contracts.worker import Group, WorkerSpec


def rank_endpoint(spec: WorkerSpec, device: torch.device, clock: Clock) -> Endpoint:
    """The endpoint of a rank. Raises ChannelError."""
    config = spec.config.channel
    spin_s = config.spin_s
    if spin_s is None:
        ranks = spec.attention_ranks + spec.expert_ranks  # at most so many are on this node
        if spec.group is Group.PREFILL:
            ranks = spec.prefill_ranks
        spin_s = SPIN_S if ranks <= usable_cores() else 0.0
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
    """`config.backend` must be resolved by now, not "auto". placement: a digest, the same on all
    peers. Raises ChannelError."""
    backend = _backend(config.backend, device)
    return backend(
        name=name,
        token=token,
        epoch=epoch,
        config=config,
        clock=clock,
        device=indexed(device),
        placement=placement,
    )


def _backend(backend: str, device: torch.device) -> type[BaseEndpoint]:
    """The class, and whether this machine has what it needs. Raises ChannelError."""
    wanted = "cpu" if backend in ("shm", "tcp") else "cuda"
    if backend not in ("shm", "tcp", "nccl", "ipc"):
        raise ChannelError(
            f"channel.backend={backend}: choose shm, tcp, nccl or ipc before making an endpoint"
        )
    if device.type != wanted:
        raise ChannelError(
            f"channel.backend={backend} moves {wanted} memory, this rank computes on {device}: "
            f"use {'nccl or ipc' if wanted == 'cpu' else 'shm or tcp'}"
        )
    if backend == "shm":
        return ShmEndpoint
    if backend == "tcp":
        return TcpEndpoint
    if backend == "nccl":
        require_nccl()
        return NcclEndpoint
    require_cupy(backend)
    return IpcEndpoint
