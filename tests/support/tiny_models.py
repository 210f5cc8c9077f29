"""Tiny random checkpoints, written by `transformers` as it writes them for the hub.

`make_tiny_checkpoint(folder, family, **overrides)` returns the folder; the same arguments give the
same bytes. `tiny_checkpoint` (tests/conftest.py) caches one per set of arguments and session.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

VOCABULARY = list(range(131))
HALVES = [(0,), (1,)]  # of a test's variants, to be crossed with families
Checkpoints = Callable[..., Path]  # the fixture `tiny_checkpoint`
_COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # logits of order 1, and routing that is not uniform
}
_LATENT = {
    "moe_intermediate_size": 20,
    "intermediate_size": 56,
    "num_key_value_heads": 6,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 14,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 7,
        "moe_intermediate_size": 20,
        "intermediate_size": 56,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 7, "intermediate_size": 20},
    "deepseek_v2": {
        **_LATENT,
        "n_routed_experts": 7,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": 22,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "num_local_experts": 7,
        "intermediate_size": 20,
        "sliding_window": 11,
        "swiglu_limit": 1.5,  # small enough to clamp
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e3,  # so that `truncate` makes a difference
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}
FAMILIES = tuple(_FAMILY)
_CLASSES = {
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "qwen2_moe": "Qwen2Moe",
    "olmoe": "Olmoe",
    "minimax_m2": "MiniMaxM2",
    "phimoe": "Phimoe",
    "granitemoe": "GraniteMoe",
    "granitemoeshared": "GraniteMoeShared",
    "kimi_k2": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "solar_open": "SolarOpen",
    "dots1": "Dots1",
    "exaone_moe": "ExaoneMoe",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "afmoe": "Afmoe",
    "llama4_text": "Llama4",
    "mimo_v2_flash": "MiMoV2Flash",
}
_SCORED = {
    "n_routed_experts": 9,
    "moe_intermediate_size": 20,
    "intermediate_size": 56,
    "n_shared_experts": 1,
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 7, "moe_intermediate_size": 20, "intermediate_size": 56,
                  "shared_expert_intermediate_size": 28},
    "olmoe": {"num_experts": 7, "intermediate_size": 20, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 7, "intermediate_size": 20, "rotary_dim": 4},
    "phimoe": {"num_local_experts": 7, "intermediate_size": 20, "num_experts_per_tok": 2,
               "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": {"num_local_experts": 7, "intermediate_size": 20, "head_dim": 8,
                   "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                   "attention_multiplier": 0.3, "logits_scaling": 1.5},
    "kimi_k2": _FAMILY["deepseek_v3"],
    "glm4_moe": {**_SCORED, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {**_LATENT, **_SCORED, "q_lora_rank": 22},
    "solar_open": _SCORED,
    "dots1": {**_SCORED, "first_k_dense_replace": 1, "norm_topk_prob": True},
    "exaone_moe": {"num_experts": 9, "moe_intermediate_size": 20, "intermediate_size": 56,
                   "sliding_window": 11, "sliding_window_pattern": 2},
    "ernie4_5_moe": {"moe_num_experts": 9, "moe_k": 3, "moe_intermediate_size": 20,
                     "intermediate_size": 56},
    "hunyuan_v1_moe": {"num_experts": 7, "moe_topk": 3, "intermediate_size": 20},
    "afmoe": {"num_experts": 9, "moe_intermediate_size": 20, "intermediate_size": 56,
              "num_dense_layers": 1, "sliding_window": 11, "global_attn_every_n_layers": 2,
              "mup_enabled": True, "route_scale": 1.3},
    "mimo_v2_flash": {"n_routed_experts": 9, "moe_intermediate_size": 20, "intermediate_size": 56,
                      "num_key_value_heads": 1, "v_head_dim": 9, "sliding_window": 11,
                      "layer_types": ["full_attention", *["sliding_attention"] * 2],
                      "rope_parameters": {
                          kind: {"rope_type": "default", "rope_theta": theta,
                                 "partial_rotary_factor": 0.34}
                          for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e4))
                      }},
    "llama4_text": {"num_local_experts": 7, "num_experts_per_tok": 1, "intermediate_size": 20,
                    "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2,
                    "num_hidden_layers": 4, "no_rope_layer_interval": 2,
                    "attention_chunk_size": 11, "floor_scale": 16},
}  # fmt: skip
MORE_FAMILIES["granitemoeshared"] = {**MORE_FAMILIES["granitemoe"], "shared_intermediate_size": 28}
_FAMILY |= MORE_FAMILIES
UNUSUAL_FAMILIES = ("olmoe", "afmoe", "llama4_text")  # with steps that no other family has
_STATES = {"qwen3_next": "Qwen3Next", "qwen3_5_moe_text": "Qwen3_5Moe"}
_CLASSES |= _STATES
_WITH_STATES = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "num_experts": 7,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "head_dim": 16,
}
for _family in _STATES:
    _FAMILY[_family] = _WITH_STATES
_CLASSES["kimi_linear"] = "KimiLinear"
_FAMILY["kimi_linear"] = {
    **{key: value for key, value in _LATENT.items() if key != "head_dim"},
    "num_experts": 9,
    "q_lora_rank": None,
    "num_hidden_layers": 4,
    "layer_types": _WITH_STATES["layer_types"],
    "linear_num_heads": 3,
    "linear_head_dim": 10,
    "routed_scaling_factor": 1.3,
    "pad_token_id": 0,
}
_CLASSES |= {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
_FAMILY["deepseek_v32"] = {
    **_FAMILY["deepseek_v3"],
    "index_topk": 13,
    "index_n_heads": 12,
    "index_head_dim": 18,
}
_FAMILY["glm_moe_dsa"] = {
    **_FAMILY["deepseek_v32"],
    "n_group": 1,
    "topk_group": 1,
    "indexer_types": ["full", "shared", "full"],
}
ALL_FAMILIES = tuple(_FAMILY)


def make_tiny_checkpoint(
    folder: Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    fused: bool = False,
    old_keys: bool = False,
    **overrides: Any,
) -> Path:
    """A checkpoint of `family` (a key of `_CLASSES`) in `folder`.

    overrides: config fields. max_shard_size ("40KB"): several shards with an index. fused: experts
    as one tensor per layer. old_keys: config.json spelled as before `transformers` 5.
    """
    model = build_tiny_model(family, seed=seed, **overrides).to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    save_tiny_model(model, folder, family, fused=fused, **size)
    if old_keys:
        _spell_as_before(folder / "config.json")
    return folder


def save_tiny_model(model: Any, folder: Path, family: str, *, fused: bool, **size: str) -> None:
    model.save_pretrained(folder, save_original_format=not fused, **size)
    if family == "kimi_k2":  # `transformers` does not know its name
        set_config(folder, model_type=family)


def build_tiny_model(family: str = "qwen3_moe", *, seed: int = 0, **overrides: Any) -> Any:
    """The `transformers` model in float32, evaluation mode; norms and biases are random too."""
    import transformers

    model_class = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")
    config = text_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                is_centred = family in _STATES and "linear_attn" not in name  # stored minus 1
                torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if is_centred else (0.5, 1.5)))
            elif name.endswith("A_log"):  # states that last: others make the norm after them tiny
                torch.nn.init.uniform_(parameter, -5.0, -1.0)
            elif name.endswith(("bias", "sinks")) or "router.gate" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.3)
    return model


def text_config(family: str, **overrides: Any) -> Any:
    """Return the `transformers` configuration of a tiny model."""
    import transformers

    suffix = "TextConfig" if family.endswith("_text") else "Config"
    config_class = getattr(transformers, f"{_CLASSES[family]}{suffix}")
    return config_class(**{**_COMMON, **_FAMILY[family], **overrides})


def _spell_as_before(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))


def prompts(seed: int, lengths: Sequence[int], vocabulary: int = 131) -> list[list[int]]:
    """Token ids of the tiny models' vocabulary, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def prompt(seed: int, length: int) -> list[int]:
    """Return the token ids of one prompt."""
    return prompts(seed, [length])[0]


def set_config(folder: Path, **fields: Any) -> None:
    """Changes fields of the checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def crossed(
    families: Sequence[tuple[Any, ...]], variants: Sequence[tuple[Any, ...]], every: int = 2
) -> list[ParameterSet]:
    """Return each family with every second (third, ...) variant, and the rest as slow ones."""
    return [
        pytest.param(*family, *variant, marks=[pytest.mark.slow][: (number + place) % every])
        for number, family in enumerate(families)
        for place, variant in enumerate(variants)
    ]
