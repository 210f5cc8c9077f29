"""`tandem profile` on a device: its path on CPU tensors, its events on the CUDA model's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.device
from actors.engine import executor
from actors.moe import expert_server
from actors.planning.planner_inputs import shape_of
from actors.planning.stage_probe import ExpertTask, ProbedPass, StageProbe, pool_tokens_for
from cluster.tools.profile import hardware_profile
from cluster.tools.profile.hardware_profile import rank_device
from contracts.errors import ConfigError, PeerError, ResourceError
from contracts.traces import Stage
from kernels.device import DeviceTimes, GpuMemory
from kernels.steps import Steps
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from models.spec.model import read_spec
from tests.support.cuda_model import FreeModel, installed
from tests.support.tiny_models import Checkpoints

CPU = torch.device("cpu")
RAGGED = [(0, 20), (16, 17), (32, 40)]  # a prompt, a decode step, a chunk behind a prefix
ATTENTION_US, SHARED_US, HEAD_US = 2000.0, 700.0, 90.0
CALL_US, PAIR_US = 300.0, 40.0  # of experts


class Device(FreeModel):
    """A device whose kernels take the time that `takes` adds."""

    def count_query(self) -> None:
        """Count nothing: time passes in kernels only."""

    def takes(self, steps: Callable[..., Steps[Any]], of: Callable[..., float]) -> Any:
        def timed(*arguments: Any) -> Steps[Any]:
            result = yield from steps(*arguments)
            self.now_us += of(*arguments)
            return result

        return timed


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    def pairs_us(half: ExpertHalf, layer: int, x_CD: Tensor, pairs_CM: Tensor, n: Tensor) -> float:
        return CALL_US + PAIR_US * int(n.sum())

    def head_us(half: AttentionHalf, hidden_RD: Tensor) -> Tensor:
        made.now_us += HEAD_US
        return logits(half, hidden_RD)

    with installed():
        made, logits = Device(), AttentionHalf.logits
        monkeypatch.setattr(kernels.device, "ACCELERATORS", frozenset({"cpu"}))
        for module in (executor, expert_server):
            monkeypatch.setattr(module, "work_times", DeviceTimes)
        for kind, name, of in (
            (AttentionHalf, "steps", lambda *_: ATTENTION_US),
            (AttentionHalf, "shared_steps", lambda *_: SHARED_US),
            (ExpertHalf, "device_steps", pairs_us),
        ):
            monkeypatch.setattr(kind, name, made.takes(getattr(kind, name), of))
        monkeypatch.setattr(AttentionHalf, "logits", head_us)
        monkeypatch.setattr(ExpertHalf, "steps", None)  # of the host
        yield made


def probed(folder: Path, ranks: int) -> ProbedPass:
    spec, pool = read_spec(folder), pool_tokens_for(RAGGED)
    with closing(
        StageProbe(folder, spec, torch.float32, pool_tokens=pool, expert_ranks=ranks)
    ) as probe:
        probe.run(RAGGED, seed=1)
        return probe.run(RAGGED, seed=0)


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_moe", 3), ("deepseek_v3", 1)])
def test_tasks_have_the_devices_times_and_the_pairs_of_the_host_path(
    family: str, ranks: int, tiny_checkpoint: Checkpoints, request: pytest.FixtureRequest
) -> None:
    folder = tiny_checkpoint(family)
    host = probed(folder, ranks)
    request.getfixturevalue("device")
    found = probed(folder, ranks)
    assert found.copies == ranks
    own_us = {Stage.ATTENTION: ATTENTION_US, Stage.SHARED: SHARED_US}
    assert [(task.stage, task.layer) for task in found.attention] == [
        (task.stage, task.layer) for task in host.attention
    ]
    for task in found.attention:
        assert task.seconds == pytest.approx(1e-6 * own_us[task.stage])
    for expert in found.expert:
        assert expert.seconds == pytest.approx(1e-6 * (CALL_US + PAIR_US * expert.pairs))
    layers = len(read_spec(folder).moe_layers) - 1
    assert len(found.expert) == ranks * layers, "each rank has a packet of each layer"
    numbers = [sorted(task[:3] for task in one.expert if task.pairs) for one in (host, found)]
    assert numbers[0] == numbers[1]


def test_a_batchs_time_outside_layers_is_the_devices_and_the_hosts_around_it(
    device: Device, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "actors.planning.stage_probe.time", SimpleNamespace(thread_time=lambda: 0.0)
    )
    folder = tiny_checkpoint("deepseek_v3")
    with closing(StageProbe(folder, read_spec(folder), torch.float32, pool_tokens=512)) as probe:
        for micro_batches in (1, 2):
            seconds = probe.serve([20, 7], micro_batches=micro_batches, seed=1)
            assert seconds == pytest.approx(1e-6 * micro_batches * HEAD_US)


def test_a_failed_pass_is_an_error_and_not_an_endless_wait(
    device: Device, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    pool = pool_tokens_for(RAGGED)
    with closing(StageProbe(folder, read_spec(folder), torch.float32, pool_tokens=pool)) as probe:

        def step() -> list[ExpertTask]:
            probe._ends[1].close()
            return []

        monkeypatch.setattr(probe._experts, "step", step)
        with pytest.raises(PeerError, match="expert-0"):
            probe.run(RAGGED, seed=0)


@pytest.mark.long
def test_profile_recovers_the_devices_costs(
    device: Device, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of known costs; its link is that of the host."""
    monkeypatch.setattr(hardware_profile, "rank_device", lambda name: CPU)
    monkeypatch.setattr(hardware_profile, "BACKENDS", ("shm",))
    monkeypatch.setattr(hardware_profile, "SERVED", ((1, 16), (3, 8), (6, 4), (2, 16)))
    sizes = [1, 3, 8, 20, 60]
    chunks = [((0, tokens),) * count for tokens in sizes for count in (1, 3)]
    monkeypatch.setattr(hardware_profile, "batches", lambda longest: chunks)
    monkeypatch.setattr(hardware_profile, "MAX_ROUNDS", 3)
    folder = tiny_checkpoint("qwen3_moe")
    found = hardware_profile.profile(folder, "float32", 5.0, "cuda")
    fits = {fit.stage: fit for fit in found.fits}
    assert list(fits) == ["attention", "expert", "serving", "a2e shm", "e2a shm"]
    assert fits["expert"].median_error_fraction < 0.01
    shape = shape_of(read_spec(folder), 4)
    pair_us = 1e3 * found.expert.ms_per_flop * shape.pair_flops
    assert pair_us == pytest.approx(PAIR_US, rel=0.05)
    assert found.expert.call_ms == pytest.approx(1e-3 * CALL_US, rel=0.1)


@pytest.mark.parametrize(("gpus", "links"), [(1, {"ipc": 0}), (4, {"ipc": 1, "nccl": 1})])
def test_a_gpus_links_are_between_two_gpus_if_there_are_two(
    gpus: int, links: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: gpus),
        ("get_device_properties", lambda number: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(hardware_profile, "set_device_environment", lambda: None)
    for name in ("auto", "cuda"):
        device = rank_device(name)
        assert device == torch.device("cuda", 0)
        fields = {"device": "H100", "devices": gpus, "memory_bytes": 80 << 30, "shareable": False}
        assert hardware_profile.device_fields(device) == fields
        found = hardware_profile.link_ends(device)
        assert found == {key: ("cuda:0", f"cuda:{n}") for key, n in links.items()}


def test_a_missing_gpu_is_named_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_profile, "set_device_environment", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: torch finds no GPU"):
        rank_device("cuda")
    assert rank_device("auto") == rank_device("cpu") == CPU


def test_device_memory_is_that_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [100, 100]  # now, at most since the last reset
    calls: list[str] = []

    def run() -> None:
        used[1] = max(used[1], used[0] + 70)

    for name, value in (
        ("empty_cache", lambda: calls.append("empty")),
        ("mem_get_info", lambda device: (900, 1000)),
        ("reset_peak_memory_stats", lambda device: used.__setitem__(1, used[0])),
        ("memory_allocated", lambda device: used[0]),
        ("max_memory_allocated", lambda device: used[1]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    memory = GpuMemory(torch.device("cuda", 0))
    used[1] = 500  # of loading
    assert memory.peak_bytes(run) == 70
    assert memory.free_bytes() == 900
    assert calls == ["empty"], "what torch keeps for later is free"


def test_a_model_larger_than_the_gpu_is_rejected(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    memory = SimpleNamespace(free_bytes=lambda: 1 << 10)
    monkeypatch.setattr(GpuMemory, "of", lambda device: memory)
    with (
        pytest.raises(ResourceError, match=r"0\.0 GiB are free"),
        closing(StageProbe(folder, read_spec(folder), torch.float32, pool_tokens=64)),
    ):
        pass
