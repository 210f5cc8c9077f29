"""Fields as published checkpoints have them, in old spellings too, are read as they are meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.decoder.kv_pool import kv_entry_shapes
from models.spec.layer_spec import LatentSpec, RoutingSpec
from models.spec.model import ClampSpec, ModelSpec, read_spec

MSCALED = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn",
           "original_max_position_embeddings": 4096}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
          "max_position_embeddings": 163840, "moe_layer_freq": 1, "torch_dtype": "bfloat16",
          "rope_theta": 10000}  # fmt: skip
V2_LITE: dict[str, Any] = {
    **LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
    "topk_method": "greedy", "vocab_size": 102400,
    "rope_scaling": {**MSCALED, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3: dict[str, Any] = {
    **LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": {**MSCALED, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn"},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


def spec_of(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_spec(tmp_path)


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, V2_LITE)
    assert spec.moe_layers == tuple(range(1, 27))
    assert spec.routing == RoutingSpec(normalize=False)
    assert spec.shared_ffn_size == 2816
    assert spec.rope.attention_factor == 1.0
    assert spec.rope.softmax_factor == pytest.approx(1.5896, abs=1e-4)  # (0.0707 ln 40 + 1)²
    assert spec.latent == LatentSpec(
        kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True
    )


def test_deepseek_v2_with_groups(tmp_path: Path) -> None:
    groups = {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}
    spec = spec_of(tmp_path, {**V2_LITE, **groups, "routed_scaling_factor": 16.0})
    assert spec.routing == RoutingSpec(normalize=False, groups=8, kept_groups=3, scale=16.0)


def test_deepseek_v3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, V3)
    assert spec.moe_layers == tuple(range(3, 61))
    assert spec.routing == RoutingSpec(
        score="sigmoid", normalize=True, groups=8, kept_groups=4, best_of_group=2, scale=2.5
    )
    assert spec.rope.softmax_factor == pytest.approx(1.8739, abs=1e-4)  # (0.1 ln 40 + 1)²
    assert kv_entry_shapes(spec) == ((1, 576),)
    assert spec.dtype == "bfloat16"


def test_gpt_oss_20b(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GPT_OSS)
    assert spec.sliding_windows == (128, None) * 12
    assert spec.clamp == ClampSpec(alpha=1.702, limit=7.0)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.truncate) == ("yarn", 150_000.0, False)
    assert spec.attention_bias
    assert spec_of(tmp_path, {**GPT_OSS, "attention_bias": None}).attention_bias
    assert spec.dtype == "bfloat16"  # its config.json names none, and its weights are quantised
    assert not spec.has_shared_experts
