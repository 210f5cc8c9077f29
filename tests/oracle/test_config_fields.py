"""config.json is read as `transformers` reads it, or refused by name.

Each case is a checkpoint that `transformers` wrote, with a few fields of its config.json changed.
All single changes and many pairs: `python -m pytest -m slow tests/oracle/test_config_fields.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import CheckpointError
from models.spec.model import read_spec
from models.weights.checkpoint import check_checkpoint
from tests.support.config_changes import MISSING, Change, changed, outcome, pairs, single_changes
from tests.support.one_line_errors import one_line_error
from tests.support.tiny_models import FAMILIES, MORE_FAMILIES, Checkpoints

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# `transformers` holds fields to their types since its version 5, files of before had nulls and
# whole numbers; of the others it is known that they say nothing about the model.
_OURS_ALONE = (
    "StrictDataclassFieldValidationError",
    "Should have a `model_type` key",
    "NoneType",  # a null with which it cannot compute; we take the default
)
_NOT_EVALUATED = {(name, "head_dim") for name in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")}

AS_TRANSFORMERS: list[tuple[str, dict[str, Any], Change]] = [
    ("qwen3_moe", {"old_keys": True}, {"rope_theta": 1e6, "rope_scaling": YARN}),
    ("qwen3_moe", {}, {"rope_scaling": {**YARN, "rope_theta": 1e4}}),
    ("qwen3_moe", {}, {"rope_scaling": YARN}),  # theta is the default: nothing contradicts it
    ("gpt_oss", {}, {"rope_scaling": {**YARN, "rope_theta": 1e3}}),
    ("gpt_oss", {}, {"original_max_position_embeddings": 16}),
    ("mixtral", {}, {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
    ("deepseek_v2", {}, {"sliding_window": 9}),
    ("deepseek_v3", {}, {"sliding_window": 9}),
    ("deepseek_v3", {}, {"norm_topk_prob": None}),
    ("deepseek_v3", {}, {"rope_interleave": None}),
    ("qwen3_moe", {}, {"use_sliding_window": True, "sliding_window": MISSING}),
    ("qwen3_moe", {}, {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3_moe", {}, {"tie_word_embeddings": True}),
    ("gpt_oss", {"max_shard_size": "40KB"}, {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "made", "change"), AS_TRANSFORMERS, ids=str)
def test_a_field_that_is_spelled_another_way_gives_the_logits_of_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, made: dict[str, Any], change: Change
) -> None:
    folder = changed(tiny_checkpoint(family, **made), change, tmp_path / "changed")
    assert outcome(folder) == ("agree", "")


LINEAR, FULL = "linear_attention", "full_attention"


def _kimi_layers(recurrent: list[int], full: list[int]) -> Change:
    stated = {"kda_layers": recurrent, "full_attn_layers": full}
    return {"layer_types": None, "linear_attn_config": stated}


REFUSED: list[tuple[str, Change, list[str]]] = [
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN},
        ["rope_scaling", "rope_parameters.rope_theta=1e+06"],
    ),
    ("deepseek_v2", {"mlp_bias": True}, ["mlp_bias", "False"]),
    ("deepseek_v2", {"q_lora_rank": MISSING}, ["q_a_proj", "missing"]),
    ("deepseek_v2", {"topk_method": None}, ["topk_method", "greedy"]),
    ("qwen3_moe", {"is_causal": False}, ["is_causal", "True"]),
    ("qwen3_moe", {"per_layer_config": {"1": {"top_k": 1}}}, ["per_layer_config"]),
    ("qwen3_moe", {"num_experts": 5}, ["num_local_experts", "7", "5"]),
    ("qwen3_moe", {"model_type": "longcat_flash"}, ["model_type", "longcat_flash", "glm4_moe"]),
    ("qwen2_moe", {"use_sliding_window": True}, ["use_sliding_window", "True", "False"]),
    (
        "minimax_m2",
        {"rotary_dim": 5, "rope_parameters": {"rope_theta": 1e4}},
        ["partial_rotary_factor", "5", "12"],
    ),
    (
        "glm4_moe",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        ["rope_parameters.partial_rotary_factor", "3", "12"],
    ),
    ("phimoe", {"num_experts_per_tok": 3}, ["num_experts_per_tok", "3", "2"]),
    (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 5,
                "short_mscale": 1.2,
                "rope_theta": 1e4,
            }
        },
        ["rope_parameters.short_factor", "6 positive numbers"],
    ),
    *(
        ("qwen3_moe", {"model_type": name}, ["model_type", name, "supported: qwen3_moe"])
        for name in (
            *("bailing_hybrid", "granitemoehybrid", "nemotron_h", "deepseek_v4", "minimax_m3_vl"),
            "qwen3_vl_moe",
        )
    ),
    (
        "qwen3_moe",
        {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_moe"}},
        ["model_type", "'qwen3_vl_moe' around 'qwen3_moe'", "llama4, qwen3_5_moe"],
    ),
    ("phimoe", {"rope_scaling": YARN}, ["rope_scaling.rope_type", "yarn", "default"]),
    ("ernie4_5_moe", {"use_bias": True}, ["use_bias", "True", "False"]),
    ("mimo_v2_flash", {"num_key_value_heads": 2}, ["num_key_value_heads", "4", "6"]),
    ("mimo_v2_flash", {"swa_rope_theta": 5e5}, ["swa_rope_theta", "500000", "10000"]),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [1, 1, 1]}, ["hybrid_layer_pattern", "[0, 1, 1]"]),
    ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, ["add_full_attention_sink_bias"]),
    (
        "mimo_v2_flash",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ["rope_parameters.full_attention", "rope_theta"],
    ),
    ("llama4_text", {"num_experts_per_tok": 2}, ["num_experts_per_tok", "2", "1"]),
    ("llama4_text", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "4", "2"]),
    (
        "exaone_moe",
        {"sliding_window_pattern": "LLG", "layer_types": None},
        ["sliding_window_pattern", "LLG"],
    ),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "mixed", "sparse"]},
        ["mlp_layer_types", "mixed", "dense, sparse"],
    ),
    ("hunyuan_v1_moe", {"moe_topk": [3, 2, 3]}, ["moe_topk", "[3, 2, 3]"]),
    ("exaone_moe", {"sliding_window": None}, ["sliding_window", "null"]),
    ("solar_open", {"num_key_value_heads": 4}, ["num_key_value_heads", "4", "6"]),
    ("qwen3_moe", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, ["layer_types"]),
    ("gpt_oss", {"sliding_window": None}, ["sliding_window", "null"]),
    (
        "gpt_oss",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
        ["rope_parameters.full_attention", "layer type"],
    ),
    ("qwen3_moe", {"hidden_size": "big"}, ["hidden_size", "'big'"]),
    ("qwen3_moe", {"hidden_size": None}, ["hidden_size", "missing"]),
    ("qwen3_moe", {"num_hidden_layers": 0}, ["num_hidden_layers", "positive"]),
    (
        "qwen3_moe",
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        ["config.json", "model_type", "gpt2", "qwen3_moe", "mixtral"],
    ),
    (
        "qwen3_moe",
        {"quantization_config": {"quant_method": "awq"}},
        ["quantization_config", "awq", "unquantised"],
    ),
    ("qwen3_moe", {"num_key_value_heads": 4}, ["num_key_value_heads", "4", "6"]),
    ("qwen3_moe", {"num_experts_per_tok": 8}, ["num_experts_per_tok", "8", "7"]),
    ("qwen3_moe", {"head_dim": 11}, ["head_dim", "11", "odd"]),
    ("qwen3_moe", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ("qwen3_moe", {"dtype": "int4"}, ["dtype", "int4", "bfloat16"]),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, ["norm_topk_prob", "true or false"]),
    ("qwen3_moe", {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ("qwen3_moe", {"mlp_only_layers": [0.5]}, ["mlp_only_layers", "0.5"]),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "longrope"}},
        ["rope_type", "longrope", "yarn"],
    ),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "linear"}},
        ["rope_parameters.factor", "missing"],
    ),
    ("qwen3_moe", {"rope_parameters": []}, ["rope_parameters", "object"]),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "1.0"]),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        ["max_window_layers", "2", "use_sliding_window"],
    ),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "greedy"]),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
    ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob", "true"]),
    ("deepseek_v2", {"moe_layer_freq": 2}, ["moe_layer_freq", "2", "1"]),
    ("deepseek_v2", {"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
    ("deepseek_v2", {"first_k_dense_replace": 3}, ["none of the 3 layers has experts"]),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, ["n_group", "missing"]),
    ("deepseek_v3", {"n_group": 2}, ["n_group", "2 groups", "9"]),
    ("deepseek_v3", {"n_group": 9, "topk_group": 9}, ["n_group", "fewer than 2"]),
    ("deepseek_v3", {"topk_group": 4}, ["n_group", "4 of them", "topk_group"]),
    ("deepseek_v3", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "6 experts"]),
    ("deepseek_v3", {"kv_lora_rank": 20}, ["kv_a_proj_with_mqa", "[24, 48]", "[26, 48]"]),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, ["layer_types", "chunked"]),
    ("gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types", "3"]),
    ("gpt_oss", {"rope_parameters": None}, ["rope_parameters", "missing"]),
    ("gpt_oss", {"intermediate_size": 21}, ["gate_up_proj", "[7, 48, 40]", "[7, 48, 42]"]),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        ["mscale_all_dim", "linear", "yarn"],
    ),
    *(
        ("glm_moe_dsa", change, [part])
        for change, part in (
            ({"indexer_types": ["shared", "full", "full"]}, "indexer_types: expected 3 times"),
            ({"index_head_dim": 4}, "index_head_dim: 4 is less than qk_rope_head_dim=6"),
            ({"index_topk": 0}, "index_topk: expected a positive integer"),
            ({"q_lora_rank": None}, "q_lora_rank: null is not supported"),
            ({"layer_types": [FULL] * 3}, "layer_types: expected 3 times"),
        )
    ),
    *(
        ("qwen3_next", change, parts)
        for change, *parts in (
            ({"layer_types": [LINEAR] * 4}, "layer_types"),
            ({"layer_types": [LINEAR, FULL, "mamba", FULL]}, "layer_types: 'mamba'"),
            ({"linear_num_value_heads": 3}, "linear_num_value_heads: ", "=2 does not divide 3"),
            ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: expected a positive integer"),
            ({"linear_key_head_dim": 9}, "has shape", "config.json implies"),
            ({"partial_rotary_factor": 0.2, "rope_parameters": None}, "partial_rotary_factor"),
        )
    ),
    *(
        ("kimi_linear", change, parts)
        for change, *parts in (
            (_kimi_layers([1, 2], [2, 4]), "kda_layers: 2 is not one"),
            (_kimi_layers([1, 2], [4]), "kda_layers: layer 3 has no type"),
            ({"linear_attn_config": {"head_dim": 9}}, "has shape", "config.json implies"),
            ({"num_experts_per_token": 0}, "num_experts_per_token: expected a positive integer"),
            ({"num_experts_per_tok": 2}, "num_experts_per_token: 3, but num_experts_per_tok is 2"),
            ({"mla_use_nope": False}, "mla_use_nope: False is not supported"),
        )
    ),
]


@pytest.mark.parametrize(("family", "change", "parts"), REFUSED, ids=str)
def test_what_would_be_computed_otherwise_than_by_transformers_is_refused_by_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, change: Change, parts: list[str]
) -> None:
    folder = changed(tiny_checkpoint(family), change, tmp_path / "changed")
    with one_line_error(CheckpointError, *parts):
        check_checkpoint(folder)


def test_yarn_makes_the_context_its_factor_times_the_original_one(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The recipe published for Qwen3 leaves max_position_embeddings at 40960."""
    recipe = {
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 32768},
    }
    folder = tiny_checkpoint(old_keys=True)
    assert read_spec(changed(folder, recipe, tmp_path / "a")).max_context_tokens == 131072
    longer = {**recipe, "max_position_embeddings": 200_000}
    assert read_spec(changed(folder, longer, tmp_path / "b")).max_context_tokens == 200_000


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v2", "model.layers.0.mlp.gate_proj.bias"),
        ("qwen3_moe", "model.layers.1.self_attn.q_proj.bias"),
        ("mixtral", "model.layers.2.self_attn.q_norm.weight"),
        ("qwen3_moe", "model.layers.3.input_layernorm.weight"),
        ("qwen3_moe", "lm_head.bias"),
        ("glm4_moe", "model.layers.1.self_attn.o_proj.bias"),
        ("granitemoe", "model.layers.1.shared_mlp.input_linear.weight"),
    ],
)
def test_unread_tensor_error_names_tensor(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, name: str
) -> None:
    folder = with_tensors(tiny_checkpoint(family), tmp_path / "changed", name)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("mixtral", "model.rotary_emb.inv_freq"),
        ("deepseek_v3", "model.layers.3.eh_proj.weight"),
        ("glm4_moe", "model.layers.3.eh_proj.weight"),
        ("exaone_moe", "mtp.norm.weight"),
        ("deepseek_v3", "model.layers.3.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_tensors_of_which_the_logits_do_not_depend_are_left_alone(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, name: str
) -> None:
    folder = with_tensors(tiny_checkpoint(family), tmp_path / "changed", name)
    assert check_checkpoint(folder).architecture == family


def with_tensors(folder: Path, target: Path, name: str) -> Path:
    changed(folder, {}, target)
    tensors = load_file(folder / "model.safetensors")
    (target / "model.safetensors").unlink()
    save_file({**tensors, name: torch.ones(3)}, target / "model.safetensors")
    return target


def disagreement(folder: Path, family: str, change: Change, target: Path) -> str | None:
    """What is wrong with how we take `change`, None where it is as it should be."""
    kind, why = outcome(changed(folder, change, target))
    if kind in ("agree", "refused"):
        return None
    if kind == "only we load it":
        known = any(part in why for part in _OURS_ALONE)
        if known or any((family, key) in _NOT_EVALUATED for key in change):
            return None
    return f"{family} {change}: {kind}: {why}"


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_no_plausible_change_of_a_field_is_read_otherwise_than_by_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    """Every 23rd change, others in each family."""
    family_changes = single_changes()[[*FAMILIES, *MORE_FAMILIES].index(family) :: 23]
    folder, target = tiny_checkpoint(family), tmp_path / "changed"
    assert len(family_changes) > 10
    found = [disagreement(folder, family, change, target) for change in family_changes]
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("old_keys", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_every_plausible_change_and_a_thousand_pairs_are_read_as_by_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: str, old_keys: bool
) -> None:
    folder = tiny_checkpoint(family, old_keys=old_keys)
    changes = [*single_changes(), *pairs(seed=old_keys, count=1000)]
    found = [disagreement(folder, family, change, tmp_path / "changed") for change in changes]
    assert [wrong for wrong in found if wrong] == []
