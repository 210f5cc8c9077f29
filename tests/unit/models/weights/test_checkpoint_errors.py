"""Invalid checkpoint folders give one-line errors with the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import CheckpointError
from models.weights.checkpoint import check_checkpoint
from tests.support.tiny_models import set_config

Make = Callable[..., Path]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tiny_checkpoint: Make, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model")


@pytest.fixture
def sharded(tiny_checkpoint: Make, tmp_path: Path) -> Path:
    folder = tiny_checkpoint("mixtral", max_shard_size="40KB")
    return shutil.copytree(folder, tmp_path / "sharded")


def error_of(folder: Path, *parts: str) -> None:
    """Check that the error is one line with each of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_valid_folder_passes(single: Path, sharded: Path) -> None:
    assert check_checkpoint(single).architecture == "qwen3_moe"
    assert check_checkpoint(sharded).architecture == "mixtral"


def test_missing_folder(tmp_path: Path) -> None:
    error_of(tmp_path / "nowhere", "nowhere", "no such folder")


def test_missing_config(single: Path) -> None:
    (single / "config.json").unlink()
    error_of(single, "config.json", "missing")


@pytest.mark.parametrize("text", ["{", "[1]", "\ufeff"])
def test_damaged_config(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    error_of(single, "config.json", "JSON")


def test_unknown_architecture_lists_supported_ones(single: Path) -> None:
    set_config(single, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    error_of(single, "config.json", "model_type", "gpt2", "qwen3_moe", "mixtral")


def test_architecture_is_sufficient_without_model_type(single: Path) -> None:
    set_config(single, model_type=None)
    assert check_checkpoint(single).architecture == "qwen3_moe"


def test_unsupported_quantisation_is_rejected(single: Path) -> None:
    set_config(single, quantization_config={"quant_method": "awq"})
    error_of(single, "quantization_config", "awq", "unquantised")


@pytest.mark.parametrize(
    ("family", "fields", "parts"),
    [
        ("qwen3_moe", {"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ("qwen3_moe", {"hidden_size": None}, ["hidden_size", "missing"]),
        ("qwen3_moe", {"num_hidden_layers": 0}, ["num_hidden_layers", "positive"]),
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
        ("deepseek_v2", {"num_key_value_heads": 2}, ["num_key_value_heads", "6"]),
        ("deepseek_v2", {"q_lora_rank": 0}, ["q_lora_rank", "positive"]),
        ("deepseek_v2", {"moe_layer_freq": 2}, ["moe_layer_freq", "2", "1"]),
        ("deepseek_v2", {"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
        ("deepseek_v2", {"first_k_dense_replace": 3}, ["none of the 3 layers has experts"]),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, ["n_group", "missing"]),
        ("deepseek_v3", {"n_group": 2}, ["n_group", "2 groups", "9"]),
        ("deepseek_v3", {"n_group": 9, "topk_group": 9}, ["n_group", "fewer than 2"]),
        ("deepseek_v3", {"topk_group": 4}, ["n_group", "4 of them", "topk_group"]),
        ("deepseek_v3", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "6 experts"]),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, ["qk_rope_head_dim", "5", "odd"]),
        ("deepseek_v3", {"kv_lora_rank": None}, ["kv_lora_rank", "missing"]),
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
    ],
)
def test_wrong_config_field_is_named(
    tiny_checkpoint: Make, tmp_path: Path, family: str, fields: dict[str, Any], parts: list[str]
) -> None:
    folder = shutil.copytree(tiny_checkpoint(family), tmp_path / "model")
    set_config(folder, **fields)
    error_of(folder, *parts)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    error_of(sharded, shard.name, "missing", INDEX)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_shard(sharded: Path, kept: int) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:kept])
    error_of(sharded, shard.name, "truncated", f"{len(data[:kept])} bytes", "download it again")


def test_damaged_header(single: Path) -> None:
    path = single / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"x" * 32
    path.write_bytes(data)
    error_of(single, "model.safetensors", "damaged", "download it again")


def test_git_lfs_pointer(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    error_of(single, "model.safetensors", "git lfs pull")


def test_index_with_tensor_missing_in_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = shards[0]
    (sharded / INDEX).write_text(json.dumps(index))
    error_of(sharded, "model.norm.weight", shards[0], INDEX)


def test_index_outside_folder_is_rejected(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    error_of(sharded, "../elsewhere.safetensors", "plain file name")


def test_empty_index(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    error_of(sharded, INDEX, "weight_map")


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.mlp.experts.6.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
    ],
)
def test_missing_tensor(single: Path, name: str) -> None:
    change_tensors(single, lambda tensors: tensors.__delitem__(name))
    error_of(single, name, "missing", "shape")


def test_wrong_shape_error_names_tensor_and_shapes(single: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    change_tensors(single, lambda tensors: tensors.update({name: torch.zeros(21, 48)}))
    error_of(single, name, "[21, 48]", "[20, 48]", "config.json")


def test_wrong_shape_of_fused_experts(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("mixtral", fused=True), tmp_path / "model")
    set_config(folder, num_local_experts=8)
    error_of(folder, "[7, 48]", "[8, 48]")


def test_integer_weights_are_rejected(single: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    zeros = torch.zeros(20, 48, dtype=torch.int8)
    change_tensors(single, lambda tensors: tensors.update({name: zeros}))
    error_of(single, name, "I8", "BF16")


def test_pickled_weights_are_not_read(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    error_of(single, "pytorch_model.bin", "pickled", "safetensors")


def test_shards_without_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    error_of(sharded, INDEX, "download")


def test_folder_without_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    error_of(single, "no weights", "model.safetensors")
