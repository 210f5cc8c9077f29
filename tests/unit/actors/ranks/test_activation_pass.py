"""KV pools of a GPU: `kv.memory_fraction` of what weights and the largest batch leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.device
from actors.ranks import activation_pass
from actors.ranks.serving_rank import serving_pool
from contracts.config import TandemConfig
from contracts.errors import ResourceError
from kernels.device import GpuMemory
from kernels.gpu_experts import gpu_experts
from models.decoder.attention import kv_bytes_per_token
from models.decoder.decoder import AttentionHalf
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.group_harness import group_config
from tests.support.tiny_models import Checkpoints

TOKENS = 96


class Memory(GpuMemory):
    """Memory with free and peak bytes that the test gives. `ran`: passes."""

    def __init__(self, free: int, peak: int) -> None:
        self.free, self.peak, self.ran = free, peak, 0

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        self.ran += 1
        return self.peak


class Full(Memory):
    def peak_bytes(self, run: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def half(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints) -> AttentionHalf:
    folder = tiny_checkpoint(request.param)
    return AttentionHalf.load(Checkpoint(folder), read_spec(folder), dtype=torch.float32)


def config(**kv: Any) -> TandemConfig:
    schedule = {"max_batch_tokens": TOKENS, "max_batch_sequences": 4096}
    return group_config(schedule=schedule, kv={"pool_tokens": None, **kv})


def token_bytes(half: AttentionHalf) -> int:
    return kv_bytes_per_token(half.spec, half.dtype)


@pytest.mark.parametrize(("copies", "as_on_a_device"), [(0, False), (1, True), (3, True)])
def test_pass_runs_all_layers_with_the_largest_batch(
    half: AttentionHalf, copies: int, as_on_a_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_device:
        monkeypatch.setattr(kernels.device, "ACCELERATORS", frozenset({"cpu"}))
    layers: list[tuple[int, int]] = []
    rows: list[int] = []
    attend = AttentionHalf.attend

    def attending(own: AttentionHalf, layer: int, hidden_TD: Tensor, *others: Any) -> Any:
        layers.append((layer, len(hidden_TD)))
        return attend(own, layer, hidden_TD, *others)

    def computing(x_TD: Tensor, *others: Any) -> Tensor:
        rows.append(len(x_TD))
        return gpu_experts(x_TD, *others)

    monkeypatch.setattr(AttentionHalf, "attend", attending)
    monkeypatch.setattr(activation_pass, "gpu_experts", computing)
    memory = Memory(1 << 30, 1 << 20)
    assert activation_pass.activation_bytes(half, config(), memory, copies) == 1 << 20
    assert layers == [(layer, TOKENS) for layer in range(half.spec.num_layers)]
    assert rows == [copies * TOKENS] * len(half.spec.moe_layers) * bool(copies)


@pytest.mark.parametrize(("given", "fraction"), [(None, 0.9), (0.5, 0.5)])
def test_pool_is_a_fraction_of_what_weights_and_pass_leave(
    half: AttentionHalf, given: float | None, fraction: float
) -> None:
    block_bytes = 16 * token_bytes(half)
    memory = Memory(100 * block_bytes, 40 * block_bytes)
    kv = serving_pool(half, config(memory_fraction=given), ranks_on_node=1, memory=memory)
    assert kv.num_blocks == int(60 * fraction)
    assert memory.ran == 1


def test_given_pool_needs_no_pass(half: AttentionHalf) -> None:
    memory = Memory(100 * 16 * token_bytes(half), 0)
    kv = serving_pool(half, config(pool_tokens=320), ranks_on_node=1, memory=memory)
    assert (kv.num_blocks, memory.ran) == (20, 0)


@pytest.mark.parametrize(("copies", "section"), [(0, "schedule"), (1, "prefill")])
def test_too_little_memory_is_one_line_that_names_the_fields(
    half: AttentionHalf, copies: int, section: str
) -> None:
    for memory, what in (
        (Memory(1 << 20, 1 << 20), rf"kv\.memory_fraction=0\.9 .*; raise it or lower {section}\."),
        (Full(1 << 20, 0), rf"{section}\.max_batch_tokens={TOKENS}: .*; lower it"),
    ):
        with pytest.raises(ResourceError, match=what) as caught:
            serving_pool(half, config(), ranks_on_node=1, expert_copies=copies, memory=memory)
        assert "\n" not in caught.value.message


def test_only_a_gpu_has_memory_of_its_own() -> None:
    assert GpuMemory.of(torch.device("cpu")) is None
    assert isinstance(GpuMemory.of(torch.device("cuda", 0)), GpuMemory)
    kv = TandemConfig().kv
    assert (kv.fraction(on_gpu=True), kv.fraction(on_gpu=False)) == (0.9, 0.2)
