"""Checkpoints with random weights, in Hugging Face's format, of any size that fits the disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.spec.model import ModelSpec, read_spec
from models.weights import layout
from models.weights.layout import WeightSpec

# About 120 M parameters: large enough that GEMMs dominate, small enough for two cores.
MEDIUM: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "norm_topk_prob": True,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": 0,
}

# The same size in DeepSeek-V2's shape: latent attention, a dense first layer, two shared experts.
MEDIUM_SHARED: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": 0,
}

# MEDIUM's size in OLMoE's shape: a norm of the whole projection, as many KV heads as query heads.
MEDIUM_OLMOE: dict[str, Any] = MEDIUM | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "norm_topk_prob": False,
}

# MEDIUM's size in GLM-4.5's shape: half rope, biases, a sigmoid router, a dense first layer.
MEDIUM_GLM4_MOE: dict[str, Any] = MEDIUM | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def write_random_checkpoint(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """A folder with config.json and one shard per layer. Norms are ones, the rest is normal."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    spec = read_spec(folder)
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(seed)
    shards = [("outer", list(layout.outer_tensors(spec).values()))]
    shards += [(f"layer{i}", list(_layer(spec, i))) for i in range(spec.num_layers)]
    weight_map = {}
    for name, weight_specs in shards:
        tensors = {w.names[0]: _random(w, generator).to(dtype) for w in weight_specs}
        file = f"model-{name}.safetensors"
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _layer(spec: ModelSpec, layer: int) -> Iterator[WeightSpec]:
    yield from layout.attention_half_layer(spec, layer)
    if not spec.is_moe(layer):
        return
    if spec.clamp is not None:
        yield from layout.clamped_expert_tensors(spec, layer).values()
        return
    names = spec.family.experts
    if names is not None and names.gate is None:
        yield from layout.fused_expert_tensors(spec, layer).values()
        return
    for expert in range(spec.num_experts):
        yield from layout.expert_tensors(spec, layer, expert).values()


def _random(weight_spec: WeightSpec, generator: torch.Generator) -> torch.Tensor:
    if len(weight_spec.shape) == 1:
        return torch.ones(weight_spec.shape)
    scale: float = weight_spec.shape[-1] ** -0.5
    return torch.randn(weight_spec.shape, generator=generator) * scale
