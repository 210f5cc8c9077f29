"""Modes by device: the test of each one, or what to choose instead.

Read by configuration, ranks, docs/configuration.md and a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from contracts.errors import ConfigError

if TYPE_CHECKING:
    from contracts.config import TandemConfig


class Mode(NamedTuple):
    """One mode.

    cpu, cuda: file of its tests on that device (a GPU's code may run on CPU tensors); empty: it is
    refused there. instead: what to do then.
    """

    setting: str
    is_set: Callable[[TandemConfig], bool]
    cpu: str = ""
    cuda: str = ""
    instead: str = ""


def _prefill(kind: str, cuda: str = "", cpu: str = "tests/oracle/test_prefill_fidelity.py") -> Mode:
    return Mode(
        f"prefill.experts={kind}",
        lambda config: config.groups.prefill_ranks > 0 and config.prefill.experts == kind,
        cpu,
        cuda,
        "use resident, streamed, cached, gathered, hybrid or all_to_all",
    )


def _channel(kind: str, cpu: str, cuda: str) -> Mode:
    return Mode(
        f"channel.backend={kind}",
        lambda config: config.groups.ranks > 1 and config.channel.backend == kind,
        cpu,
        cuda,
        f"use {'shm, tcp' if cuda else 'nccl, ipc'} or auto",
    )


_GROUP, _STREAMED = "tests/oracle/test_group_fidelity.py", "tests/gpu/test_streamed_cuda.py"
_HOST, _CUDA = "tests/unit/actors/channels/test_backends.py", "tests/gpu/test_channels_cuda.py"
_GATHERED = "tests/unit/actors/gather/test_device_gather.py"
_PLACED = "tests/oracle/test_placements.py"
_INSTEAD = "leave it out, or set groups.device=cpu"
_QUANTISED = "tests/oracle/test_quantised_checkpoints.py"
_GRAPHS = "tests/oracle/test_decode_graphs.py"
MODES = (
    Mode("attention over pages", lambda config: True,
         "tests/unit/kernels/test_compiled.py", "tests/unit/kernels/interpreted_triton.py"),
    Mode("schedule.cuda_graphs=true", lambda config: bool(config.schedule.cuda_graphs),
         cuda=_GRAPHS, instead="leave it out"),
    Mode("groups.expert_ranks", lambda config: config.groups.expert_ranks > 0,
         _GROUP, _PLACED),
    Mode("experts.slots, experts.bytes (expert ranks)",
         lambda config: config.groups.expert_ranks > 0 and config.experts.is_bounded,
         _GROUP, _PLACED),
    Mode("experts.storage_format=true", lambda config: config.experts.storage_format is True,
         _QUANTISED, _QUANTISED),
    Mode("experts.storage_format (experts.slots, experts.bytes)",
         lambda config: config.experts.storage_format is True and config.experts.is_bounded,
         _QUANTISED, instead=_INSTEAD),
    Mode("experts.speculative=speculated",
         lambda config: config.experts.speculative == "speculated",
         "tests/unit/actors/offload/test_cached_backend.py", instead=_INSTEAD),
    _prefill("resident", _STREAMED),
    _prefill("streamed", _STREAMED),
    _prefill("cached", "tests/gpu/test_cached_cuda.py"),
    _prefill("gathered", _GATHERED),
    _prefill("hybrid", _GATHERED),
    _prefill("all_to_all", _PLACED, _PLACED),
    _prefill("shuffled", cpu="tests/oracle/test_shared_batches.py"),
    _channel("shm", _HOST, ""),
    _channel("tcp", _HOST, ""),
    _channel("nccl", "", _CUDA),
    _channel("ipc", "", _CUDA),
)  # fmt: skip


def refusal(config: TandemConfig, device: str) -> str:
    """Return why a configuration does not run on "cpu" or "cuda", or an empty string."""
    for mode in MODES:
        if not (mode.cuda if device == "cuda" else mode.cpu) and mode.is_set(config):
            return f"{mode.setting}: not with groups.device={device}: {mode.instead}"
    return ""


def check_device(config: TandemConfig, device: str) -> None:
    """Raise ConfigError if a configuration does not run on a device such as "cuda:0"."""
    reason = refusal(config, device.partition(":")[0])
    if reason:
        raise ConfigError(reason)
