"""Changes of a tiny checkpoint's config.json, and whether `transformers` and we read them alike.

`single_changes(config)` are plausible values for each key, one at a time; `outcome(folder)` loads
the folder both ways. The oracle test takes some of them, its slow run all, and pairs.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from contracts.errors import CheckpointError
from tests.support.local_model import LocalModel
from tests.support.transformers_oracle import Oracle

MISSING = "<missing>"  # as a value: the key is taken out
TOLERANCE = 1e-4
Change = dict[str, Any]
Outcome = Literal["agree", "refused", "differ", "only we load it"]

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_WIDE = {"rope_theta": 500.0, "original_max_position_embeddings": 500}  # bounds not at pair 0
_ROPES: tuple[Any, ...] = (
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 0.5, "rope_theta": 2e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 2e4},
    {"rope_type": "default", "type": "linear", "factor": 2.0},
    {"type": "default", "rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64, "rope_theta": 1e4},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "rope_theta": 1e4},
    _YARN,
    {**_YARN, "rope_theta": 2e4},
    {"type": "yarn", "factor": 4.0, "rope_theta": 2e4},
    {**_YARN, "factor": None},
    {**_YARN, "factor": 1.0},
    {**_YARN, "factor": 0.5},
    {**_YARN, "truncate": True, **_WIDE},
    {**_YARN, "truncate": False, **_WIDE},
    {**_YARN, "truncate": None, **_WIDE},
    {"rope_type": "yarn", "original_max_position_embeddings": 32},
    {**_YARN, "attention_factor": 1.7},
    {**_YARN, "attention_factor": 0.0},
    {**_YARN, "attention_factor": None, "beta_fast": 20, "beta_slow": 2},
    {**_YARN, "beta_fast": 0, "beta_slow": None},
    {**_YARN, "mscale": 0.7},
    {**_YARN, "mscale_all_dim": 0.7},
    {**_YARN, "mscale": 1.4, "mscale_all_dim": 0.7},
    {**_YARN, "mscale": 1, "mscale_all_dim": 0},
    {**_YARN, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
     "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
    {"rope_theta": 2e4},
    {"rope_theta": None, "rope_type": "default"},
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": (*_ROPES, MISSING),
    "rope_scaling": _ROPES,
    "rope_theta": (500, 3e4, None),
    "original_max_position_embeddings": (16, 1024, None),
    "partial_rotary_factor": (0.5, 1.0, None),
    "max_position_embeddings": (64, 100, 4096, MISSING),
    "sliding_window": (None, 5, 9, 1000, 0, MISSING),
    "use_sliding_window": (True, False, None, MISSING),
    "max_window_layers": (0, 1, 28, None),
    "layer_types": (None, MISSING, ["full_attention"] * 3, ["sliding_attention"] * 3,
                    ["full_attention", "sliding_attention", "full_attention"]),
    "num_experts": (5, 7, 9),
    "num_local_experts": (5, 7, 9, MISSING),
    "n_routed_experts": (5, 7, 9, MISSING),
    "num_experts_per_tok": (1, 2, 4, None, MISSING),
    "experts_per_token": (1, 4),
    "n_group": (None, 1, 3, 9, MISSING),
    "topk_group": (None, 1, 2, 3, MISSING),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None, MISSING),
    "scoring_func": ("softmax", "sigmoid", None),
    "norm_topk_prob": (True, False, None, MISSING),
    "routed_scaling_factor": (0.5, 1, 3.0, None, MISSING),
    "moe_layer_freq": (1, 2, None),
    "first_k_dense_replace": (0, 1, 2, None, MISSING),
    "num_nextn_predict_layers": (0, 1, 2),
    "num_mtp_layers": (0, 1),
    "rope_interleave": (True, False, None, MISSING),
    "q_lora_rank": (None, 22, MISSING),
    "head_dim": (None, 6, 8, 12, MISSING),
    "qk_head_dim": (8, 16),
    "num_key_value_heads": (None, 1, 2, 6, MISSING),
    "num_attention_heads": (3, 6, 12),
    "num_hidden_layers": (1, 2, 4),
    "n_shared_experts": (0, 1, 2, None, MISSING),
    "rms_norm_eps": (1e-2, 0.3, 1, None, MISSING),
    "layer_norm_eps": (0.3,),
    "tie_word_embeddings": (True, False, None, MISSING),
    "attention_bias": (True, False, None, MISSING),
    "mlp_bias": (True, False, None),
    "bias": (True,),
    "qkv_bias": (True,),
    "hidden_act": ("gelu", "relu", None, MISSING),
    "hidden_activation": ("gelu",),
    "decoder_sparse_step": (1, 2, 0, None, MISSING),
    "mlp_only_layers": (None, [], [0], [1], [7], MISSING),
    "moe_intermediate_size": (10, 20),
    "intermediate_size": (28, 56, 20),
    "shared_expert_intermediate_size": (20,),
    "hidden_size": (24, 48),
    "vocab_size": (97, 131, 140),
    "swiglu_alpha": (0.8, 1, None, MISSING),
    "swiglu_limit": (0.3, 7, None, MISSING),
    "is_causal": (False, True),
    "use_bidirectional_attention": (True,),
    "attention_chunk_size": (8,),
    "per_layer_config": ({"1": {"sliding_window": 5}}, {"1": {"num_experts_per_tok": 1}}, {}),
    "logit_scale": (0.5,),
    "final_logit_softcapping": (3.0,),
    "attention_multiplier": (0.3,),
    "query_pre_attn_scalar": (100,),
    "initial_context_length": (16,),
    "router_jitter_noise": (0.5,),
    "attention_dropout": (0.5,),
    "output_router_logits": (True,),
    "router_aux_loss_coef": (0.5,),
    "pretraining_tp": (2,),
    "use_cache": (False,),
    "use_qk_norm": (True, False),
    "pad_token_id": (3, None),
    "bos_token_id": (3, None),
    "eos_token_id": ([3, 4], None),
    "dtype": ("bfloat16", "float16", None, MISSING),
    "torch_dtype": ("bfloat16",),
    "architectures": (None, ["Qwen3MoeForSequenceClassification"], MISSING),
    "model_type": (MISSING, "llama", "qwen2_moe"),
    "transformers_version": ("4.40.0", MISSING),
}  # fmt: skip


def single_changes() -> list[Change]:
    return [{key: value} for key, values in _VALUES.items() for value in values]


def together(*changes: Change) -> Change:
    return {key: value for change in changes for key, value in change.items()}


def changed(folder: Path, change: Change, target: Path) -> Path:
    """A folder `target` with the same weights and a changed config.json."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    config = {**json.loads((folder / "config.json").read_text()), **change}
    config = {key: value for key, value in config.items() if value != MISSING}
    (target / "config.json").write_text(json.dumps(config))
    for weights in folder.glob("*.safetensors*"):
        (target / weights.name).symlink_to(weights)
    return target


def outcome(folder: Path) -> tuple[Outcome, str]:
    """How the two compare on a prompt of 90 tokens, and why they do not agree."""
    try:
        ours = LocalModel.load(folder, dtype="float32")
    except CheckpointError as error:
        return "refused", str(error)
    prompt = prompt_tokens()
    try:
        theirs = _theirs(folder, prompt)
    except Exception as error:  # noqa: BLE001  whatever it is, `transformers` does not serve it
        return "only we load it", f"{type(error).__name__}: {str(error).strip()[:200]}"
    found = ours.forward([prompt])[0]
    difference = (found - theirs).abs().max().item()
    if not difference < TOLERANCE:
        return "differ", f"by {difference:.3g} of {theirs.abs().max().item():.3g}"
    return "agree", ""


@lru_cache(maxsize=1)
def prompt_tokens() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 97, (90,), generator=generator).tolist()


def _theirs(folder: Path, prompt: list[int]) -> torch.Tensor:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    return Oracle(folder).logits(prompt)


def pairs(seed: int, count: int) -> Iterator[Change]:
    """`count` random pairs of changes."""
    changes = single_changes()
    generator = torch.Generator().manual_seed(seed)
    for first, second in torch.randint(0, len(changes), (count, 2), generator=generator).tolist():
        yield together(changes[first], changes[second])
