"""Experts read from a file by a reader process."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.offload.file_tier import ENTRIES, FileTier, open_expert_file
from contracts.clock import monotonic_s
from contracts.errors import ChannelError
from contracts.requests import Priority
from models.experts.expert_cache import ExpertCache
from models.experts.expert_format import ComputeFormat, ComputeSlots
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.weights.checkpoint import check_checkpoint
from tests.support.tiny_models import Checkpoints

DEADLINE_S = 20.0


class Rig:
    def __init__(
        self, folder: Path, store: Path, *, slots: int, direct_io: bool, deadline_s: float
    ) -> None:
        self.model = check_checkpoint(folder)
        self.layout = ExpertLayout(self.model, torch.float32, torch.device("cpu"))
        self.file = open_expert_file(
            folder,
            ComputeFormat(self.layout),
            store=store,
            deadline_s=DEADLINE_S,
            direct_io=direct_io,
        )
        self.tier = FileTier(self.file)
        self.cache = ExpertCache(
            self.tier, ComputeSlots(self.layout, slots), "lru", deadline_s=deadline_s
        )

    def compute(self, layer: int, experts: list[int]) -> dict[int, list[bytes]]:
        """Return the contents of each expert's slot."""
        request = self.cache.request(layer, experts, Priority.LS)
        found: dict[int, list[bytes]] = {}
        while request.left:
            taken = self.cache.acquire(request, dict.fromkeys(experts, 1), 1)
            for expert, slot in taken:
                found[expert] = list(map(bytes, self.cache._memory[slot]))
            self.cache.complete(request, taken)
            if not taken:
                self.cache.wait(0.05)
        return found


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=3)


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*, slots: int = 4, direct_io: bool = False, deadline_s: float = DEADLINE_S) -> Rig:
        rigs.append(Rig(folder, tmp_path, slots=slots, direct_io=direct_io, deadline_s=deadline_s))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.cache.close()
        rig.cache.close()


@pytest.mark.parametrize("direct_io", [False, True])
def test_slots_match_checkpoint(folder: Path, opened: Callable[..., Rig], direct_io: bool) -> None:
    rig = opened(direct_io=direct_io)
    source = open_host_source(folder, rig.layout, store=None, deadline_s=DEADLINE_S)
    whole = ComputeSlots(rig.layout, rig.model.num_experts)
    for layer in rig.model.moe_layers:
        source.copy(layer, whole.buffer)
        experts = list(range(rig.model.num_experts))
        found = rig.compute(layer, experts)
        for expert in experts:
            assert found[expert] == list(map(bytes, whole.memory(expert)))
        rig.cache.check()
    source.close()


def test_unsupported_direct_io_is_logged_and_falls_back(
    opened: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_file = os.open

    def refuses(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuses)
    rig = opened(direct_io=True)
    assert rig.file._direct is None
    assert "direct_io_unavailable" in caplog.text
    monkeypatch.undo()
    assert rig.compute(0, [1]) == opened(direct_io=True).compute(0, [1])


def test_truncated_file_is_named_with_remedy(opened: Callable[..., Rig]) -> None:
    rig = opened()
    os.truncate(rig.file.path, rig.file.record_bytes)
    assert rig.compute(0, [0])
    with pytest.raises(ChannelError, match=r"records-.*\.bin: \d+ bytes at \d+: it is cut short"):
        rig.compute(2, [1])


def test_dead_reader_is_an_error(opened: Callable[..., Rig]) -> None:
    rig = opened()
    rig.tier._process.kill()
    rig.tier._process.wait()
    start_s = monotonic_s()
    with pytest.raises(ChannelError, match=r"records-.*the process that reads it has ended"):
        rig.compute(0, [1])
    assert monotonic_s() - start_s < 10.0


def test_hung_reader_is_an_error_after_its_deadline(opened: Callable[..., Rig]) -> None:
    rig = opened(deadline_s=0.3)
    rig.tier._process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rig.tier._process.pid, os.WSTOPPED)  # all its threads
    start_s = monotonic_s()
    with pytest.raises(ChannelError, match=r"experts \[1, 2\] of layer 0 .*/records-.*0\.3 s"):
        rig.compute(0, [1, 2])
    assert monotonic_s() - start_s < 10.0
    rig.cache.cancel(rig.cache._requests[0])
    rig.cache.check()
    rig.tier._process.send_signal(signal.SIGCONT)
    end_s = monotonic_s() + DEADLINE_S
    while rig.tier.room < ENTRIES:
        assert monotonic_s() < end_s
        rig.cache.wait(0.05)
    assert sorted(rig.cache._free) == list(range(rig.cache.slots))


def test_reader_ends_with_its_worker_without_descriptors(opened: Callable[..., Rig]) -> None:
    opened().compute(0, [1])
    before = len(os.listdir("/proc/self/fd"))
    rig = opened()
    rig.compute(0, [1])
    process = rig.tier._process
    rig.cache.close()
    assert process.poll() is not None
    assert len(os.listdir("/proc/self/fd")) == before
