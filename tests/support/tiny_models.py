"""Tiny random checkpoints, written by `transformers` as it writes them for the hub.

`make_tiny_checkpoint(folder, family, **overrides)` returns the folder; the same arguments give the
same bytes. `tiny_checkpoint` (tests/conftest.py) caches one per set of arguments and session.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = list(range(131))
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
}


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
    model.save_pretrained(folder, save_original_format=not fused, **size)
    if old_keys:
        _spell_as_before(folder / "config.json")
    return folder


def build_tiny_model(family: str = "qwen3_moe", *, seed: int = 0, **overrides: Any) -> Any:
    """The `transformers` model in float32, evaluation mode; norms and biases are random too."""
    import transformers

    config_class = getattr(transformers, f"{_CLASSES[family]}Config")
    model_class = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")
    config = config_class(**{**_COMMON, **_FAMILY[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.3)
    return model


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


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of the tiny models' vocabulary, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in lengths]


def prompt(seed: int, length: int) -> list[int]:
    """Return the token ids of one prompt."""
    return prompts(seed, [length])[0]


def set_config(folder: Path, **fields: Any) -> None:
    """Changes fields of the checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
