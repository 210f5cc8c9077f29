"""A GPU's cache of experts: slots in its memory, the others in the host's, pinned."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.experts.caching import frequencies, show
from actors.experts.device_plane import DeviceCache
from actors.telemetry.telemetry import Telemetry
from contracts.config import ExpertsConfig
from contracts.errors import ConfigError, ResourceError
from contracts.worker import WorkerSpec
from models.experts.device_lanes import device_lane
from models.experts.device_slots import DeviceSlots, OnDevice
from models.experts.device_tier import DeviceTier
from models.experts.expert_cache import ExpertCache
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import PinnedExperts
from models.experts.slot_budget import slots_for
from planner.policies.eviction import eviction
from planner.policies.read_ahead import pays


def device_cache(spec: WorkerSpec, layout: ExpertLayout, telemetry: Telemetry) -> DeviceCache:
    """layout: plain. Raises CheckpointError, ResourceError, ConfigError."""
    config, expert_bytes = spec.config, layout.num_bytes(1)
    check_device(config.experts, spec.device)
    slots = slots_for(config.experts, expert_bytes, layout.spec)
    check_memory(config.experts, slots, expert_bytes, free_bytes(layout.device), spec.device)
    where = config.prefill.host_store
    host = PinnedExperts(
        Path(spec.model_folder),
        layout,
        store=None if where is None else Path(where),
        deadline_s=config.groups.ready_timeout_s,
    )
    form = _Kept(layout, config.experts, spec.device)
    lane = device_lane(layout.device)
    tier = DeviceTier(host, layout, lane)
    order = eviction(config.experts.evict, slots, frequencies(spec, layout.spec))
    try:
        cache = ExpertCache(tier, form, slots, order, pays, deadline_s=config.channel.deadline_s)
    except ResourceError:
        host.close()
        raise
    show(cache, spec.name, telemetry)
    return DeviceCache(cache, form.made, tier, lane, host.close)


class _Kept(OnDevice):
    """Remembers the slots that it has made. made: once a cache has them."""

    made: DeviceSlots

    def __init__(self, layout: ExpertLayout, config: ExpertsConfig, device: str) -> None:
        super().__init__(layout)
        self._config, self._device = config, device
        self._expert_bytes, self._free_bytes = layout.num_bytes(1), free_bytes(layout.device)

    def slots(self, count: int) -> DeviceSlots:
        """Raises ResourceError."""
        try:
            self.made = super().slots(count)
        except torch.OutOfMemoryError:
            raise _too_large(
                self._config, count, self._expert_bytes, self._free_bytes, self._device
            ) from None
        return self.made


def check_device(config: ExpertsConfig, device: str) -> None:
    """Raises ConfigError for what a GPU's cache cannot do."""
    wrong = {
        "experts.stored=true": config.stored,
        "experts.execute=speculated": config.execute == "speculated",
        "experts.hint_again=true": config.hint_again,
    }
    for key, is_set in wrong.items():
        if is_set:
            raise ConfigError(f"{key}: not on {device}: leave it out, or set groups.device=cpu")


def check_memory(
    config: ExpertsConfig, slots: int, expert_bytes: int, free: int, device: str
) -> None:
    """free: bytes of the device's memory. Raises ResourceError."""
    if slots * expert_bytes > free:
        raise _too_large(config, slots, expert_bytes, free, device)


def _too_large(
    config: ExpertsConfig, slots: int, expert_bytes: int, free: int, device: str
) -> ResourceError:
    name = "slots" if config.slots is not None else "bytes"
    given = config.slots if config.slots is not None else config.bytes
    most = free // expert_bytes
    allowed = most if name == "slots" else most * expert_bytes
    return ResourceError(
        f"experts.{name}={given}: {slots} experts of {expert_bytes} bytes are "
        f"{slots * expert_bytes}, and {free} bytes are free on {device}: give less than "
        f"experts.{name}={allowed}, for attention and the KV pool need memory too"
    )


def free_bytes(device: torch.device) -> int:
    """Of the device's memory; of a CPU's nobody asks."""
    if device.type != "cuda":
        return 1 << 62
    return int(torch.cuda.mem_get_info(device)[0])
