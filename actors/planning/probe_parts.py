"""What a stage probe is made of: the layers that are loaded, and ends of a channel that have
joined."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from actors.channels.base import Endpoint, PeerJoined
from actors.channels.factory import make_endpoint
from actors.channels.handshake import new_token
from contracts.clock import Clock
from contracts.config import ChannelConfig
from contracts.errors import ChannelError, ResourceError
from contracts.machine import available_bytes
from models.decoder.kv_pool import kv_bytes_per_token
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.loading import total_bytes

MOE_LAYERS = 5  # that are loaded: several, so that weights do not stay in the cache
_ATTENTION = "attention-0"
_MEMORY_FRACTION = 0.8
_JOIN_S = 10.0


def first_layers(spec: ModelSpec) -> ModelSpec:
    """`spec` cut after its first MOE_LAYERS layers with experts."""
    moe_layers = spec.moe_layers[:MOE_LAYERS]
    num_layers = moe_layers[-1] + 1
    return msgspec.structs.replace(
        spec,
        num_layers=num_layers,
        moe_layers=moe_layers,
        sliding_windows=spec.sliding_windows[:num_layers],
    )


def check_memory(spec: ModelSpec, dtype: torch.dtype, pool_tokens: int) -> None:
    """Raises ResourceError where weights and pool do not fit in what is free."""
    experts = len(spec.moe_layers) * spec.num_experts * layout.expert_elements(spec)
    needed = experts * dtype.itemsize + total_bytes(layout.attention_half_tensors(spec), dtype)
    needed += pool_tokens * kv_bytes_per_token(spec, dtype)
    available = available_bytes()
    if needed > _MEMORY_FRACTION * available:
        raise ResourceError(
            f"model: {spec.num_layers} layers to measure need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are free: profile on a machine with more memory"
        )


def joined(experts: Sequence[str], clock: Clock) -> tuple[Endpoint, list[Endpoint]]:
    """The attention rank's end, and those of the expert ranks. Raises ChannelError."""
    token = new_token()
    # One thread steps all ends, so that each is silent while another computes: never hung.
    config = ChannelConfig(backend="shm", silence_s=600.0)
    device = torch.device("cpu")
    ends = [
        make_endpoint(name=name, token=token, epoch=1, config=config, clock=clock, device=device)
        for name in (_ATTENTION, *experts)
    ]
    attention_end, *expert_ends = ends
    for end in expert_ends:
        attention_end.connect(end.name, end.listen())
        if not any(isinstance(happening, PeerJoined) for happening in end.poll(_JOIN_S)):
            raise ChannelError(f"{_ATTENTION} did not join {end.name} within {_JOIN_S} s")
    return attention_end, expert_ends
