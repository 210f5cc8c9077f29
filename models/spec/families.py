"""Model families. A new one is an entry here, plus its new mathematics."""

from __future__ import annotations

import msgspec

from models.spec.family import ExpertNames, Family

_LAYER = "model.layers.{layer}"
_MLP, _SPARSE = f"{_LAYER}.mlp", f"{_LAYER}.block_sparse_moe"
_SHARED = f"{_LAYER}.shared_mlp"


def _like(family: Family, model_type: str, architecture: str, **changes: object) -> Family:
    changes |= {"model_type": model_type, "architecture": f"{architecture}ForCausalLM"}
    return msgspec.structs.replace(family, **changes)


# fmt: off
_QWEN3_MOE = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    num_experts_keys=("num_experts", "num_local_experts"), expert_ffn_key="moe_intermediate_size",
    router=(f"{_MLP}.gate.weight",),
    experts=ExpertNames(
        gate=f"{_MLP}.experts.{{expert}}.gate_proj.weight",
        up=f"{_MLP}.experts.{{expert}}.up_proj.weight",
        down=f"{_MLP}.experts.{{expert}}.down_proj.weight",
    ),
    qk_norm="head", default_norm_topk=False, rounds_topk_weights=True, dense="qwen",
    bias_key="attention_bias", window_switch_key="use_sliding_window", default_window=4096,
    default_kv_heads=4, default_top_k=8,
)

_QWEN2_MOE = _like(
    _QWEN3_MOE, "qwen2_moe", "Qwen2Moe", num_experts_keys=("num_experts",), qk_norm="",
    bias_key="qkv_bias", default_attention_bias=True, has_output_bias=False, windows="none",
    required=(("use_sliding_window", False),), default_kv_heads=16, default_top_k=4,
    shared=(f"{_MLP}.shared_expert",), shared_size_key="shared_expert_intermediate_size",
    default_shared=5632, shared_gate=f"{_MLP}.shared_expert_gate.weight",
)

_OLMOE = _like(
    _QWEN3_MOE, "olmoe", "Olmoe", expert_ffn_key="intermediate_size", qk_norm="projection",
    clip_key="clip_qkv", dense="none", windows="none", default_kv_heads=0,
    default_rms_norm_eps=1e-5,
)

_MIXTRAL = Family(
    model_type="mixtral", architecture="MixtralForCausalLM",
    num_experts_keys=("num_local_experts", "num_experts"), expert_ffn_key="intermediate_size",
    router=(f"{_SPARSE}.gate.weight", f"{_MLP}.gate.weight"),
    experts=ExpertNames(
        gate=f"{_SPARSE}.experts.{{expert}}.w1.weight",
        up=f"{_SPARSE}.experts.{{expert}}.w3.weight",
        down=f"{_SPARSE}.experts.{{expert}}.w2.weight",
    ),
    always_norm_topk=True, default_kv_heads=8, default_top_k=2, default_rope_theta=1_000_000.0,
    default_rms_norm_eps=1e-5,
)

_MINIMAX_M2 = _like(
    _MIXTRAL, "minimax_m2", "MiniMaxM2", qk_norm="projection", rotary_fraction=1.0,
    rotary_dim_key="rotary_dim", windows="none", routing="scored",
    correction_bias=(f"{_SPARSE}.e_score_correction_bias", f"{_MLP}.e_score_correction_bias"),
    default_head_dim=128, default_top_k=8, default_rope_theta=5_000_000.0,
    default_rms_norm_eps=1e-6,
)

_PHIMOE = _like(
    _MIXTRAL, "phimoe", "Phimoe", router=(f"{_SPARSE}.gate.weight", f"{_MLP}.router.weight"),
    bias_key="attention_bias", routing="sparsemixer", layer_norm=True, head_bias_key="lm_head_bias",
    rope_kinds=("default", "longrope"), required=(("num_experts_per_tok", 2),),
)

_GRANITE_MOE = _like(
    _MIXTRAL, "granitemoe", "GraniteMoe",
    router=(f"{_SPARSE}.router.layer.weight", f"{_SPARSE}.router.weight"),
    experts=ExpertNames(
        fused_gate_up=(f"{_SPARSE}.input_linear.weight", f"{_SPARSE}.experts.gate_up_proj"),
        fused_down=(f"{_SPARSE}.output_linear.weight", f"{_SPARSE}.experts.down_proj"),
    ),
    rounds_topk_weights=True, bias_key="attention_bias", windows="none", multipliers=True,
    default_kv_heads=0, default_rope_theta=10_000.0, default_rms_norm_eps=1e-6,
)

_GRANITE_MOE_SHARED = _like(
    _GRANITE_MOE, "granitemoeshared", "GraniteMoeShared",
    shared=(f"{_SHARED}.input_linear.weight", f"{_SHARED}.output_linear.weight"),
    shared_size_key="shared_intermediate_size", may_lack_shared=True,
)

_DEEPSEEK_V2 = Family(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM",
    num_experts_keys=("n_routed_experts", "num_experts", "num_local_experts"),
    expert_ffn_key="moe_intermediate_size", router=_QWEN3_MOE.router, experts=_QWEN3_MOE.experts,
    dense="first", bias_key="attention_bias", windows="none", attention="latent",
    routing="deepseek_v2", scale_key="routed_scaling_factor", float32_router=True,
    first_moe_key="first_k_dense_replace", shared=(f"{_MLP}.shared_experts",),
    shared_key="n_shared_experts", default_shared=2,
)

_DEEPSEEK_V3 = _like(
    _DEEPSEEK_V2, "deepseek_v3", "DeepseekV3", routing="deepseek_v3",
    correction_bias=(f"{_MLP}.gate.e_score_correction_bias",), default_routed_scale=2.5,
    default_groups=(8, 4), has_prediction_layers=True, default_first_moe=3, default_shared=1,
    default_top_k=8,
)

_KIMI_K2 = _like(_DEEPSEEK_V3, "kimi_k2", "DeepseekV3")

_GLM4_MOE_LITE = _like(
    _DEEPSEEK_V3, "glm4_moe_lite", "Glm4MoeLite", dense="types", first_moe_key=None,
    default_first_moe=1, default_q_rank=768, default_routed_scale=1.8, default_groups=(1, 1),
    default_top_k=4, default_rms_norm_eps=1e-5,
)

_DEEPSEEK_V32 = _like(
    _DEEPSEEK_V3, "deepseek_v32", "DeepseekV32", dense="types", indexer="halves",
    required=(("rope_interleave", True),),
)

_GLM_MOE_DSA = _like(
    _DEEPSEEK_V32, "glm_moe_dsa", "GlmMoeDsa", indexer="interleaved", default_index_heads=32,
    default_q_rank=2048, default_groups=(1, 1), default_rms_norm_eps=1e-5,
)

_KIMI_LINEAR = _like(
    _DEEPSEEK_V3, "kimi_linear", "KimiLinear", num_experts_keys=("num_experts",),
    aliases=(
        ("model_max_length", "max_position_embeddings"), ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"), ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"), ("num_local_experts", "num_experts"),
        ("moe_router_activation_func", "scoring_func"),
    ),
    router=(f"{_SPARSE}.gate.weight",), experts=_MIXTRAL.experts,
    correction_bias=(f"{_SPARSE}.gate.e_score_correction_bias",),
    shared=(f"{_SPARSE}.shared_experts",), recurrent="by_row", has_rope=False, dense="types",
    mlp=("mlp", "block_sparse_moe"), required=(("mla_use_nope", True),), default_first_moe=1,
    has_prediction_layers=False, default_q_rank=0, default_routed_scale=2.446,
    default_groups=(1, 1), default_rms_norm_eps=1e-5,
)

_GLM4_MOE = _like(
    _DEEPSEEK_V3, "glm4_moe", "Glm4Moe", attention="grouped", qk_norm="head",
    qk_norm_key="use_qk_norm", default_qk_norm=False, has_output_bias=False, rotary_fraction=0.5,
    default_kv_heads=8, default_routed_scale=1.0, default_groups=(1, 1), default_first_moe=1,
    default_rms_norm_eps=1e-5,
)

_SOLAR_OPEN = _like(
    _GLM4_MOE, "solar_open", "SolarOpen", dense="none", qk_norm="", qk_norm_key=None,
    rotary_fraction=None, has_prediction_layers=False, default_head_dim=128,
    default_rope_theta=1_000_000.0,
)

_DOTS1 = _like(
    _DEEPSEEK_V3, "dots1", "Dots1", attention="grouped", qk_norm="head", windows="later",
    default_window=4096, has_prediction_layers=False, default_norm_topk=False, default_kv_heads=32,
    default_routed_scale=1.0, default_groups=(1, 1), default_first_moe=0, default_shared=0,
    default_top_k=None,
)

_MIMO_V2_FLASH = _like(
    _DEEPSEEK_V3, "mimo_v2_flash", "MiMoV2Flash", num_experts_keys=("n_routed_experts",),
    attention="grouped", has_output_bias=False, rotary_fraction=0.334, rope_kinds=("default",),
    sinks=True, sink_names=("attention_sink_bias", "sinks"), windows="sixths", windows_differ=True,
    default_window=129, default_value_dim=128, value_scale=("attention_value_scale", 0.707),
    dense="types", first_moe_key=None, default_first_moe=1, shared=(), shared_key=None,
    default_routed_scale=1.0, default_groups=(1, 1), has_prediction_layers=False,
    required=(("add_full_attention_sink_bias", False), ("add_swa_attention_sink_bias", True)),
    ignored=(r"^model\.mtp\.",), default_kv_heads=4, default_head_dim=192,
    default_rope_theta=5_000_000.0, default_rms_norm_eps=1e-5,
)

_EXAONE_MOE = _like(
    _DEEPSEEK_V3, "exaone_moe", "ExaoneMoe", num_experts_keys=("num_experts",), attention="grouped",
    qk_norm="head", bias_key=None, windows="periodic", window_period=("sliding_window_pattern", 4),
    default_window=4096, ropes_windows_only=True, dense="types", default_first_moe=1,
    correction_bias=(f"{_MLP}.e_score_correction_bias", f"{_MLP}.gate.e_score_correction_bias"),
    shared_key="num_shared_experts", has_prediction_layers=False, ignored=(r"^mtp\.",),
    default_kv_heads=32, default_groups=(1, 1), default_rms_norm_eps=1e-5,
)

_ERNIE4_5_MOE = _like(
    _QWEN3_MOE, "ernie4_5_moe", "Ernie4_5_Moe", num_experts_keys=("moe_num_experts", "num_experts"),
    top_k_keys=("moe_k", "num_experts_per_tok"), qk_norm="", interleaved_rope=True, bias_key=None,
    windows="none", dense="range", routing="scored", score="softmax", always_norm_topk=True,
    float32_router=True,
    correction_bias=(
        f"{_MLP}.moe_statics.e_score_correction_bias",
        f"{_MLP}.gate.moe_statics.e_score_correction_bias",
    ),
    correction_is_matrix=True, shared=(f"{_MLP}.shared_experts",),
    shared_key="moe_num_shared_experts", default_shared=2, may_lack_shared=True,
    required=(("use_bias", False), ("moe_norm_min", 1e-12)), ignored=("mtp",), default_tied=True,
    default_top_k=6, default_rope_theta=500_000.0, default_rms_norm_eps=1e-5,
)

_HUNYUAN_V1_MOE = _like(
    _QWEN3_MOE, "hunyuan_v1_moe", "HunYuanMoEV1", expert_ffn_key="intermediate_size",
    top_k_keys=("moe_topk", "num_experts_per_tok"), router=(f"{_MLP}.gate.wg.weight",),
    float32_router=True, always_norm_topk=True, rounds_topk_weights=False, qk_norm="turned_head",
    qk_norm_names=("query_layernorm", "key_layernorm"), rope_alpha=True, windows="none",
    dense="none", shared=(f"{_MLP}.shared_mlp",), shared_size_key="intermediate_size",
    default_kv_heads=0, default_rms_norm_eps=1e-5,
)

_AFMOE = _like(
    _QWEN3_MOE, "afmoe", "Afmoe", num_experts_keys=("num_experts",),
    router=(f"{_MLP}.router.gate.weight",), rounds_topk_weights=False, routing="scored",
    always_norm_topk=True, scale_key="route_scale", correction_bias=(f"{_MLP}.expert_bias",),
    gates_attention=True, windows="periodic", window_period=("global_attn_every_n_layers", 4),
    default_window=1024, ropes_windows_only=True, dense="first", first_moe_key="num_dense_layers",
    default_first_moe=1, shared=(f"{_MLP}.shared_experts",), shared_key="num_shared_experts",
    default_shared=2, sandwich_norm=True, norm_rounds_once=True, embedding_switch_key="mup_enabled",
    default_kv_heads=0, default_head_dim=128, default_top_k=6, default_rms_norm_eps=1e-5,
)

_LLAMA4 = Family(
    model_type="llama4_text", architecture="Llama4ForCausalLM",
    num_experts_keys=("num_local_experts",), expert_ffn_key="intermediate_size",
    dense_ffn_key="intermediate_size_mlp", router=(f"{_LAYER}.feed_forward.router.weight",),
    experts=ExpertNames(
        fused_gate_up=(f"{_LAYER}.feed_forward.experts.gate_up_proj",),
        fused_down=(f"{_LAYER}.feed_forward.experts.down_proj",), transposed=True,
    ),
    qk_norm="plain_head", qk_norm_key="use_qk_norm", interleaved_rope=True,
    bias_key="attention_bias", windows="chunks", default_window=8192, routing="scored",
    weighs_input=True, default_norm_topk=False, required=(("num_experts_per_tok", 1),),
    dense="step", mlp=("feed_forward",), shared=(f"{_LAYER}.feed_forward.shared_expert",),
    shared_size_key="intermediate_size", ignored=(r"^vision_model\.", r"^multi_modal_projector\."),
    with_vision="llama4", default_kv_heads=8, default_head_dim=128, default_top_k=1,
    default_rope_theta=500_000.0, default_rms_norm_eps=1e-5,
)

_GPT_OSS = Family(
    model_type="gpt_oss", architecture="GptOssForCausalLM",
    num_experts_keys=("num_local_experts", "num_experts"), expert_ffn_key="intermediate_size",
    router=(f"{_MLP}.router.weight",), always_norm_topk=True, rounds_topk_weights=True,
    bias_key="attention_bias", default_attention_bias=True, router_bias=f"{_MLP}.router.bias",
    sinks=True, norm_rounds_once=True, windows="periodic", window_period=("", 2),
    default_window=128, needs_rope_parameters=True, default_kv_heads=8, default_top_k=4,
    default_rope_theta=150_000.0, default_rms_norm_eps=1e-5,
)

_QWEN3_NEXT = _like(
    _QWEN3_MOE,
    "qwen3_next",
    "Qwen3Next",
    windows="none",
    window_switch_key=None,
    default_norm_topk=True,
    default_head_dim=256,
    default_kv_heads=2,
    default_top_k=10,
    rotary_fraction=0.25,
    gates_queries=True,
    recurrent="by_key_head",
    centred_norms=True,
    shared=_QWEN2_MOE.shared,
    shared_size_key=_QWEN2_MOE.shared_size_key,
    default_shared=512,
    shared_gate=_QWEN2_MOE.shared_gate,
    ignored=(r"^mtp\.",),
)

_QWEN3_5_MOE = _like(
    _QWEN3_NEXT,
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    recurrent="separate",
    dense="none",
    always_norm_topk=True,
    default_top_k=8,
    ignored=(r"^mtp\.", r"^model\.visual\."),
    with_vision="qwen3_5_moe",
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _QWEN3_MOE, _QWEN2_MOE, _OLMOE, _MIXTRAL, _MINIMAX_M2, _PHIMOE, _GRANITE_MOE,
        _GRANITE_MOE_SHARED, _DEEPSEEK_V2, _DEEPSEEK_V3, _KIMI_K2, _KIMI_LINEAR, _GLM4_MOE,
        _GLM4_MOE_LITE, _SOLAR_OPEN, _DOTS1, _MIMO_V2_FLASH, _EXAONE_MOE, _ERNIE4_5_MOE,
        _HUNYUAN_V1_MOE, _AFMOE, _LLAMA4, _GPT_OSS, _QWEN3_NEXT, _QWEN3_5_MOE, _DEEPSEEK_V32,
        _GLM_MOE_DSA,
    )
}
