"""Random tiny models of the families of the table against `transformers`, in float32.

Each draw varies the fields that published checkpoints vary. It is served with the logits of
`transformers`, or refused with an error that names a drawn field. A longer run:
`python -m pytest tests/oracle/test_random_families.py --family-draws 1000`.
"""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import CheckpointError
from models.decoder.batch import SequenceSlice
from tests.support.local_model import LocalModel
from tests.support.tiny_models import MORE_FAMILIES, build_tiny_model, prompts, save_tiny_model

TOLERANCE = 1e-4
Fields = dict[str, list[Any]]

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3,
         "original_max_position_embeddings": 64}  # fmt: skip
_ROPES = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {**_YARN, "rope_theta": 1e4},
    {**_LLAMA3, "rope_theta": 5e5},
]
_LATENT_ROPES = [*_ROPES, {**_YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_COMMON: Fields = {
    "num_attention_heads, num_key_value_heads, hidden_size": [(6, 2, 48), (4, 4, 40), (3, 1, 30)],
    "num_hidden_layers": [2, 3, 4],
    "vocab_size": [131, 97],
    "rms_norm_eps": [1e-5, 1e-2],
    "tie_word_embeddings": [False, True],
    "rope_parameters": _ROPES,
}
_HEADS: Fields = {"head_dim": [8, 12, 16]}
_BIASES: Fields = {"attention_bias": [False, True]}
_SCORED: Fields = {
    "n_routed_experts": [5, 9], "num_experts_per_tok": [1, 3], "norm_topk_prob": [True, False],
    "routed_scaling_factor": [1.0, 2.5], "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1],
}  # fmt: skip
_LATENT: Fields = {
    "num_attention_heads, num_key_value_heads, hidden_size": [(6, 6, 48), (3, 3, 45)],
    "q_lora_rank": [None, 22], "qk_nope_head_dim": [8, 10], "v_head_dim": [5, 14],
    "rope_interleave": [True, False], "rope_parameters": _LATENT_ROPES,
}  # fmt: skip
_EXPERTS: Fields = {"num_experts": [5, 8], "num_experts_per_tok": [1, 2, 5]}
_LOCAL: Fields = {"num_local_experts": [5, 8], "num_experts_per_tok": [1, 2, 5]}
_PERIODS: Fields = {"sliding_window": [3, 11, 100]}
_GRANITE: Fields = {
    **_LOCAL, **_BIASES, "embedding_multiplier": [1.0, 12.0], "residual_multiplier": [1.0, 0.22],
    "attention_multiplier": [0.35, 0.02], "logits_scaling": [1.0, 6.0],
}  # fmt: skip


def _by_kind(theta: float, fraction: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "partial_rotary_factor": fraction}
    return {_FULL: {**rope, "rope_theta": theta}, _SLIDING: {**rope, "rope_theta": 1e3}}


DRAWN: dict[str, Fields] = {
    "qwen2_moe": {
        **_HEADS, **_EXPERTS, "norm_topk_prob": [True, False], "qkv_bias": [True, False],
        "shared_expert_intermediate_size": [12, 40], "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0]],
    },
    "olmoe": {
        **_EXPERTS, **_BIASES, "norm_topk_prob": [True, False], "clip_qkv": [None, 0.7],
    },
    "minimax_m2": {**_HEADS, **_LOCAL, "rotary_dim": [2, 4, 8]},
    "phimoe": {
        **_HEADS, **_BIASES, "num_local_experts": [3, 8], "num_experts_per_tok": [2, 1],
        "router_jitter_noise": [0.01, 0.3], "lm_head_bias": [True, False],
        "sliding_window": [None, 9], "rope_parameters": [*_ROPES[:2], _LONG],
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": [0, 12]},
    "kimi_k2": {**_LATENT, **_SCORED, "n_group": [1], "topk_group": [1]},
    "glm4_moe": {
        **_HEADS, **_SCORED, **_BIASES, "use_qk_norm": [True, False],
        "partial_rotary_factor": [0.5, 0.25, 1.0],
    },
    "glm4_moe_lite": {
        **_LATENT, **_SCORED, "first_k_dense_replace": [1],
        "mlp_layer_types": [None, ["sparse", "dense", "sparse", "sparse"]],
        "num_hidden_layers": [4],
    },
    "solar_open": {**_HEADS, **_SCORED, **_BIASES},
    "dots1": {
        **_HEADS, **_SCORED, **_BIASES, "sliding_window": [None, 9],
        "max_window_layers": [0, 1, 62],
    },
    "exaone_moe": {
        **_HEADS, **_EXPERTS, **_PERIODS, "sliding_window_pattern": [2, 3],
        "first_k_dense_replace": [0, 1], "num_shared_experts": [1, 2], "n_group": [1],
    },
    "ernie4_5_moe": {
        **_HEADS, "moe_num_experts": [5, 8], "moe_k": [1, 2, 5],
        "moe_num_shared_experts": [0, 1, 2], "moe_layer_start_index": [0, 1],
        "moe_layer_end_index": [-1, 1], "use_bias": [False, False, True],
    },
    "hunyuan_v1_moe": {
        **_HEADS, **_BIASES, "num_experts": [5, 8], "moe_topk": [1, 2, 5],
        "rope_parameters": [*_ROPES, _ALPHA],
    },
    "afmoe": {
        **_HEADS, **_EXPERTS, **_BIASES, **_PERIODS, "global_attn_every_n_layers": [2, 3],
        "num_dense_layers": [0, 1], "num_shared_experts": [1, 2], "mup_enabled": [True, False],
        "route_scale": [1.0, 2.8],
    },
    "mimo_v2_flash": {
        **_BIASES, "head_dim": [12, 16], "v_head_dim": [5, 12, 20], "n_routed_experts": [5, 9],
        "num_attention_heads, num_key_value_heads, hidden_size": [
            (6, 1, 48), (8, 2, 40), (4, 1, 36),
        ],
        "num_experts_per_tok": [1, 3], "norm_topk_prob": [True, False],
        "routed_scaling_factor": [None, 1.0, 2.5], "attention_value_scale": [None, 0.707, 2.0],
        "sliding_window": [3, 11, 100],
        "num_hidden_layers, layer_types, mlp_layer_types": [
            (3, None, None), (2, [_FULL, _SLIDING], ["sparse"] * 2),
            (3, [_SLIDING, _FULL, _SLIDING], None), (2, [_SLIDING] * 2, None),
            (2, [_FULL] * 2, ["sparse", "dense"]),
        ],
        "rope_parameters": [_by_kind(1e4, 0.34), _by_kind(5e5, 1.0), _by_kind(5e5, 0.5)],
    },
    "llama4_text": {
        **_HEADS, **_BIASES, "num_local_experts": [5, 8], "num_experts_per_tok": [1, 1, 2],
        "interleave_moe_layer_step": [1, 2], "no_rope_layer_interval": [2, 3],
        "attention_chunk_size": [5, 16, 100], "use_qk_norm": [True, False],
        "attn_temperature_tuning": [True, False], "moe_layers": [None, [0], [1]],
    },
}  # fmt: skip


def drawn(family: str, seed: int) -> dict[str, Any]:
    """Return the overrides of one draw."""
    chance, overrides = random.Random(f"{family} {seed}"), dict[str, Any]()
    for keys, values in {**_COMMON, **DRAWN[family]}.items():
        names, value = keys.split(", "), copy.deepcopy(chance.choice(values))
        overrides.update(zip(names, value if len(names) > 1 else (value,), strict=True))
    if family in ("granitemoe", "granitemoeshared", "olmoe"):  # heads of hidden_size / heads
        overrides["head_dim"] = overrides["hidden_size"] // overrides["num_attention_heads"]
    rope, pairs = overrides["rope_parameters"], overrides.get("head_dim", 0) // 2
    if rope.get("rope_type") == "longrope":
        rope["short_factor"] = [1.0 + 0.2 * chance.random() for _ in range(pairs)]
        rope["long_factor"] = [2.0 + chance.random() for _ in range(pairs)]
    return overrides


def test_every_family_of_the_table_is_drawn() -> None:
    assert set(DRAWN) == set(MORE_FAMILIES)


@pytest.mark.parametrize("family", DRAWN)
def test_random_models_have_the_logits_of_transformers_or_are_refused_by_name(
    tmp_path: Path, pytestconfig: pytest.Config, family: str
) -> None:
    """Prompts of two sequences in two chunks, then a decode step of both at a time."""
    draws, served = pytestconfig.getoption("family_draws"), 0
    for seed in range(draws):
        served += is_served(tmp_path / str(seed), family, seed, drawn(family, seed))
    assert served > draws // 3


def test_llama4_with_yarn_decodes_in_layers_without_rope(tmp_path: Path) -> None:
    rope = {**_YARN, "rope_theta": 1e4, "attention_factor": 1.2}
    fields = {"use_qk_norm": True, "rope_parameters": rope, "no_rope_layer_interval": 2}
    assert is_served(tmp_path / "yarn", "llama4_text", 0, {**fields, "num_hidden_layers": 2})


@torch.inference_mode()
def is_served(folder: Path, family: str, seed: int, overrides: dict[str, Any]) -> bool:
    """Return whether a model is served, with the logits of `transformers`; False: refused."""
    oracle = build_tiny_model(family, seed=seed, **overrides)
    oracle.set_experts_implementation("eager")
    save_tiny_model(oracle, folder, family, fused=seed % 2 == 1)
    model = loaded(folder)
    if isinstance(model, CheckpointError):
        message = str(model)
        assert any(key in message for key in overrides), (overrides, message)
        assert "\n" not in message
        return False
    sequences = prompts(seed, [41, 23], vocabulary=97)
    expected = [oracle(torch.tensor([ids])).logits[0] for ids in sequences]
    found = logits_in_pieces(model, sequences)
    difference = max(
        float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)
    )
    assert difference < TOLERANCE, (difference, overrides)
    return True


def loaded(folder: Path) -> LocalModel | CheckpointError:
    try:
        return LocalModel.load(folder, dtype="float32")
    except CheckpointError as error:
        return error


def logits_in_pieces(model: LocalModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Return logits of all positions: 9 tokens, then all but the last 8, then one at a time."""
    kv, tables = model.new_pool(8), ([5, 2, 0], [7, 1])
    logits = [list[torch.Tensor]() for _ in sequences]
    stops = [9, *range(-8, 1)]
    starts = [0] * len(sequences)
    for stop in stops:
        ends = [stop if stop > 0 else len(ids) + stop for ids in sequences]
        slices = [
            SequenceSlice(ids[start:end], start, table)
            for ids, start, end, table in zip(sequences, starts, ends, tables, strict=True)
        ]
        rows = model.attention.logits(model.run(slices, kv))
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        for each, part in zip(logits, torch.split(rows, counts), strict=True):
            each.append(part)
        starts = ends
    return [torch.cat(each) for each in logits]
