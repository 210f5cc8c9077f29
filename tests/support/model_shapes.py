"""Shapes of models for tests of the planner: published configurations, and any small ones."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from actors.planning.planner_inputs import shape_of
from models.spec.config_fields import ConfigFields
from models.spec.model import ModelSpec, spec_from
from planner.costs.cost_model import Deployment
from planner.costs.model_shape import ModelShape

QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536, "intermediate_size": 12288, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0,
    "vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from(ConfigFields(Path("config.json"), config))


def shape(config: dict[str, Any], **overrides: Any) -> ModelShape:
    """In bfloat16."""
    return shape_of(spec_of({**config, **overrides}), 2)


def split(ag: int = 3, eg: int = 5, tokens: int = 2048, context: int = 0) -> Deployment:
    return Deployment(
        attention_ranks=ag, expert_ranks=eg, sequence_tokens=tokens, context_tokens=context
    )


small_shapes = st.builds(
    lambda experts, chosen, hidden, layers: shape(
        QWEN3_235B,
        num_experts=experts,
        num_experts_per_tok=min(chosen, experts),
        hidden_size=64 * hidden,
        num_hidden_layers=layers,
    ),
    st.integers(1, 24),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 8),
)
