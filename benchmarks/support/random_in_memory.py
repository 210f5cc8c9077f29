"""A model with random weights that never were on a disk: made on the device, a layer at a time, and
its experts copied to the host's memory as well."""

import contextlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.linear import linears
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import ExpertLayer
from models.experts.host_experts import ExpertMemory, HostSource, pin
from models.spec.config_fields import ConfigFields
from models.spec.model import spec_from
from models.weights.layout import WeightSpec
from models.weights.loading import Loader

_PRINT_EVERY_S = 10.0

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# The same in small: every fortieth parameter of a layer, and few layers.
SMALL: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "vocab_size": 1024,
}
SHAPES = {"30b": QWEN3_30B_A3B, "small": SMALL}


class RandomModel(NamedTuple):
    """experts: all layers on the device. host: the same in the host's memory, pinned for a GPU."""

    layout: ExpertLayout
    attention: AttentionHalf
    experts: ExpertHalf
    host: HostSource


class _RandomTensors:
    """In the place of a checkpoint. Norms are ones, the rest is normal."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def load(self, weight_spec: WeightSpec) -> Tensor:
        if len(weight_spec.shape) == 1:
            return torch.ones(weight_spec.shape, device=self._device)
        return _random(torch.empty(weight_spec.shape, dtype=self._dtype, device=self._device))

    def release(self) -> None:
        """Nothing is kept."""


class OffloadedModel(NamedTuple):
    """memory: all experts, in the host's memory alone; host: closes it."""

    layout: ExpertLayout
    attention: AttentionHalf
    memory: ExpertMemory
    host: HostSource


def random_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> RandomModel:
    """Tells on stdout how far it is: pages of the host take the longest."""
    layout, attention = random_halves(config, dtype, device)
    spec, held = layout.spec, dict[int, ExpertLayer]()

    def keep(layer: int, made: tuple[Tensor, ...]) -> None:
        gate_up, down = made
        held[layer] = ExpertLayer(linears(gate_up), linears(down))

    memory = _experts(layout, keep)
    return RandomModel(layout, attention, ExpertHalf(spec, range(spec.num_experts), held), memory)


def random_offloaded(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> OffloadedModel:
    """The same without experts on the device."""
    layout, attention = random_halves(config, dtype, device)
    memory = _experts(layout, lambda layer, made: None)
    return OffloadedModel(layout, attention, memory, memory)


def random_halves(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[ExpertLayout, AttentionHalf]:
    """Return the layout of experts, and the attention half, without experts."""
    spec = spec_from(ConfigFields(Path("random"), config))
    torch.manual_seed(0)
    loader = Loader(_RandomTensors(device, dtype), dtype, device, None, 0)
    attention = AttentionHalf(spec, loader, dtype, device)
    return ExpertLayout(spec, dtype, device, packed=False), attention


def _experts(layout: ExpertLayout, keep: Callable[[int, tuple[Tensor, ...]], None]) -> ExpertMemory:
    """All experts in the host's memory. keep: receives each layer's on the device."""
    spec = layout.spec
    stored: list[tuple[Tensor, ...]] = []
    pinned: list[Tensor] = []
    printed_s = time.monotonic()
    for layer in spec.moe_layers:
        memory = _host_memory(layout.num_bytes(spec.num_experts))
        if layout.device.type == "cuda":
            pin(memory, f"experts of layer {layer}")
            pinned.append(memory)
        stored.append(layout.views(memory, spec.num_experts))
        made = tuple(_random(tensor) for tensor in layout.empty(spec.num_experts))
        for view, tensor in zip(stored[-1], made, strict=True):
            view.copy_(tensor)
        keep(layer, made)
        if time.monotonic() - printed_s > _PRINT_EVERY_S:
            printed_s = time.monotonic()
            print(f"made: {layer + 1} of {spec.num_layers} layers", flush=True)
    return ExpertMemory(stored, layout, pinned)


def _host_memory(num_bytes: int) -> Tensor:
    """Each page of it is there: by all cores, before one thread pins them."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(0)


def _random(tensor: Tensor) -> Tensor:
    return tensor.normal_(std=tensor.shape[-1] ** -0.5)
