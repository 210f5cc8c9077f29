"""Model families: tensor names, and values that config.json does not state.

A new family is an entry here plus its new maths. Names are templates over `{layer}` and `{expert}`;
of several names, the first that the checkpoint holds is used.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Names = tuple[str, ...]


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of an expert's matrices, stored one by one or fused.

    One by one: gate and up [F, D], down [D, F]. Fused: gate_up [E, 2F, D] (gate rows first), down
    [E, D, F].
    """

    gate: str
    up: str
    down: str
    fused_gate_up: str = "model.layers.{layer}.mlp.experts.gate_up_proj"
    fused_down: str = "model.layers.{layer}.mlp.experts.down_proj"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A model family.

    `rounds_topk_weights`: routing weights pass through the model dtype, as in `transformers`.
    `reads_window`: `sliding_window` counts, if the field `window_switch_key` is true;
    `default_window`: its default. `alternating_window`: default of layers with different windows.
    `has_prediction_layers`: tensors of layers past num_hidden_layers are not needed for the logits.
    `first_moe_key`: field with the number of leading dense layers. `shared`: place of the shared
    experts' MLP. `float32_router`: the router computes in float32. `experts` None: only the clamped
    format exists (layout.clamped_expert_tensors).
    """

    model_type: str
    architecture: str
    num_experts_keys: Names
    expert_ffn_key: str
    router: Names
    experts: ExpertNames | None = None
    qk_norm: bool = False
    always_norm_topk: bool = False
    rounds_topk_weights: bool = False
    may_have_dense_layers: bool = False
    reads_attention_bias: bool = False
    window_switch_key: str | None = None
    reads_window: bool = True
    default_window: int | None = None
    default_rope_theta: float = 10_000.0
    default_rms_norm_eps: float = 1e-6
    default_top_k: int | None = None
    default_kv_heads: int = 0
    attention: Literal["grouped", "latent"] = "grouped"
    routing: Literal["plain", "deepseek_v2", "deepseek_v3"] = "plain"
    float32_router: bool = False
    correction_bias: str | None = None
    default_routed_scale: float = 1.0
    default_groups: tuple[int | None, int | None] = (None, None)
    first_moe_key: str | None = None
    default_first_moe: int = 0
    shared: str | None = None
    default_shared_experts: int = 0
    router_bias: str | None = None
    sinks: bool = False
    norm_rounds_once: bool = False
    alternating_window: int | None = None
    default_attention_bias: bool = False
    needs_rope_parameters: bool = False
    has_prediction_layers: bool = False


_QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    num_experts_keys=("num_experts", "num_local_experts"),
    expert_ffn_key="moe_intermediate_size",
    router=("model.layers.{layer}.mlp.gate.weight",),
    experts=ExpertNames(
        gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        up="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        down="model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
    qk_norm=True,
    rounds_topk_weights=True,
    may_have_dense_layers=True,
    reads_attention_bias=True,
    window_switch_key="use_sliding_window",
    default_window=4096,
    default_kv_heads=4,
    default_top_k=8,
)

_MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    num_experts_keys=("num_local_experts", "num_experts"),
    expert_ffn_key="intermediate_size",
    router=(
        "model.layers.{layer}.block_sparse_moe.gate.weight",
        "model.layers.{layer}.mlp.gate.weight",
    ),
    experts=ExpertNames(
        gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    ),
    always_norm_topk=True,
    default_kv_heads=8,
    default_top_k=2,
    default_rope_theta=1_000_000.0,
    default_rms_norm_eps=1e-5,
)

_DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    num_experts_keys=("n_routed_experts", "num_experts", "num_local_experts"),
    expert_ffn_key="moe_intermediate_size",
    router=_QWEN3_MOE.router,
    experts=_QWEN3_MOE.experts,
    may_have_dense_layers=True,
    reads_attention_bias=True,
    reads_window=False,
    attention="latent",
    routing="deepseek_v2",
    float32_router=True,
    first_moe_key="first_k_dense_replace",
    shared="model.layers.{layer}.mlp.shared_experts",
    default_shared_experts=2,
)

_DEEPSEEK_V3 = msgspec.structs.replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    routing="deepseek_v3",
    correction_bias="model.layers.{layer}.mlp.gate.e_score_correction_bias",
    default_routed_scale=2.5,
    default_groups=(8, 4),
    has_prediction_layers=True,
    default_first_moe=3,
    default_shared_experts=1,
    default_top_k=8,
)

_GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    num_experts_keys=("num_local_experts", "num_experts"),
    expert_ffn_key="intermediate_size",
    router=("model.layers.{layer}.mlp.router.weight",),
    always_norm_topk=True,
    rounds_topk_weights=True,
    reads_attention_bias=True,
    default_attention_bias=True,
    router_bias="model.layers.{layer}.mlp.router.bias",
    sinks=True,
    norm_rounds_once=True,
    alternating_window=128,
    needs_rope_parameters=True,
    default_kv_heads=8,
    default_top_k=4,
    default_rope_theta=150_000.0,
    default_rms_norm_eps=1e-5,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (_QWEN3_MOE, _MIXTRAL, _DEEPSEEK_V2, _DEEPSEEK_V3, _GPT_OSS)
}
