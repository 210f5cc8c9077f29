"""Specs of published configurations, including old spellings."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from models.spec.config_fields import find_known_model, known_model_names
from models.spec.layer_spec import LatentSpec, RoutingSpec
from models.spec.model import ClampSpec, ModelSpec, kv_entry_shapes, read_spec
from models.weights.checkpoint import check_checkpoint


def published(name: str) -> dict[str, Any]:
    config = find_known_model(name)
    assert config is not None
    return config


V2_LITE, V3, GPT_OSS = map(published, ("DeepSeek-V2-Lite", "DeepSeek-V3", "gpt-oss-20b"))


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
    assert kv_entry_shapes(spec, 0) == ((1, 576),)
    assert spec.dtype == "bfloat16"


def test_gpt_oss_20b(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GPT_OSS)
    assert spec.sliding_windows == (128, None) * 12
    assert spec.clamp == ClampSpec(alpha=1.702, limit=7.0)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.truncate) == ("yarn", 150_000.0, False)
    assert spec.attention_bias
    assert spec_of(tmp_path, {**GPT_OSS, "attention_bias": None}).attention_bias
    assert spec.dtype == "bfloat16"  # not in config.json; the weights are quantised
    assert not spec.num_shared_experts


def write_header(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Write a bfloat16 checkpoint whose data are a hole in the file."""
    header, stop = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)


@pytest.mark.parametrize("name", [name for name in known_model_names() if "gpt-oss" not in name])
def test_tensors_of_the_same_model_in_transformers_are_all_read(tmp_path: Path, name: str) -> None:
    """Models on the meta device, in full size."""
    import transformers

    config = {**published(name)}
    config.pop("quantization_config", None)
    kind = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    has_vision = "text_config" in config
    auto = (
        transformers.AutoModelForImageTextToText
        if has_vision
        else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        made = transformers.CONFIG_MAPPING[kind].from_dict({**config, "model_type": kind})
        model = auto.from_config(made)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    if config["model_type"] == "kimi_linear":
        shapes = stored_kimi_shapes(shapes)
    write_header(tmp_path, {key: shape for key, shape in shapes.items() if key not in tied})
    text = config["text_config"] if has_vision else config
    assert check_checkpoint(tmp_path).hidden_size == text["hidden_size"]


def stored_kimi_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the names of the published files, where convolutions are stored one by one."""
    stored = dict[str, list[int]]()
    for name, shape in shapes.items():
        name = name.replace(".forget_gate.", ".")
        if ".mlp." in name and ".layers.0." not in name:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            roles = ("w1", "w3") if "gate_up" in name else ("w2",)
            at = name.rpartition(".")[0]
            for expert, role in itertools.product(range(shape[0]), roles):
                stored[f"{at}.{expert}.{role}.weight"] = [shape[1] // len(roles), shape[2]]
        elif name.endswith(".conv1d.weight"):
            for role in "qkv":
                part = name.replace(".conv1d.", f".{role}_conv1d.")
                stored[part] = [shape[0] // 3, *shape[1:]]
        else:
            stored[name] = shape
    return stored


def test_longrope_limits_the_context_to_the_original_one(tmp_path: Path) -> None:
    assert spec_of(tmp_path, published("Phi-3.5-MoE-instruct")).max_context_tokens == 4096


def test_mimo_v2_flash(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, published("MiMo-V2-Flash"))
    assert spec.sliding_windows[:7] == (None, 129, 129, 129, 129, None, 129)
    assert kv_entry_shapes(spec, 0) == ((4, 192), (4, 128))
    assert kv_entry_shapes(spec, 1) == ((8, 192), (8, 128))
    ropes = [spec.rope_of(layer) for layer in (0, 1)]
    assert [rope.theta for rope in ropes if rope] == [5e6, 1e4]
    assert spec.rope_dim == 64


def test_kimi_linear(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, published("Kimi-Linear-48B-A3B-Instruct"))
    assert spec.recurrent is not None
    full = {*range(27)} - {*spec.recurrent_layers}
    assert full == {3, 7, 11, 15, 19, 23, 26}
    assert kv_entry_shapes(spec, 3) == ((1, 576),)
    assert spec.rope_of(3) is None
    assert spec.max_context_tokens == 1 << 20


@pytest.mark.parametrize("name", known_model_names())
def test_known_model_is_found_by_name_and_hub_id(tmp_path: Path, name: str) -> None:
    config = published(name.lower())
    assert spec_of(tmp_path, config).num_experts > 1
    assert find_known_model(f"org/{name}") is None
    assert find_known_model("Qwen/Qwen3-30B-A3B") is find_known_model("qwen3-30b-a3b")
