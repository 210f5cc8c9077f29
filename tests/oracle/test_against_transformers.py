"""Our decoder against `transformers` on tiny random checkpoints, float32.

Tolerance 1e-4 absolute on logits of order 1 (measured: below 1e-5); greedy tokens equal.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from models.decoder.batch import SequenceSlice
from tests.support.local_model import LocalModel
from tests.support.tiny_models import MORE_FAMILIES, Checkpoints
from tests.support.transformers_oracle import Oracle

TOLERANCE = 1e-4
STEPS = 64

MSCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
Variants = dict[str, dict[str, Any]]  # overrides of a tiny config, by what they try

QWEN: Variants = {
    "uneven experts, wide heads": {},
    "a dense layer, tied, biased, unnormalised": {
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "norm_topk_prob": False,
    },
    "every second layer sparse, odd sizes": {
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 14,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "vocab_size": 97,
    },
    "a sliding window": {"use_sliding_window": True, "sliding_window": 9, "num_experts": 13},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
MIXTRAL: Variants = {
    "uneven experts, wide heads": {},
    "tied, default head size": {"tie_word_embeddings": True, "head_dim": None, "hidden_size": 60},
    "window shorter than the prompt": {"sliding_window": 7, "num_local_experts": 3},
    "one KV head, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 64}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}  # fmt: skip
DEEPSEEK_V2: Variants = {
    "no q-LoRA, greedy, a dense layer": {},
    "q-LoRA, biases, groups, scaled": {
        "q_lora_rank": 26,
        "attention_bias": True,
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.5,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
    },
    "yarn beyond the original length, odd heads": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 45,
        "qk_nope_head_dim": 8,
        "v_head_dim": 5,
        "first_k_dense_replace": 2,
        "n_routed_experts": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {**MSCALED, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
}
DEEPSEEK_V3: Variants = {
    "groups, q-LoRA, a dense layer": {},
    "no q-LoRA, one group, unnormalised, biases": {
        "q_lora_rank": None,
        "n_routed_experts": 5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "attention_bias": True,
        "routed_scaling_factor": 0.8,
        "first_k_dense_replace": 2,
    },
    "yarn with two scales, rope in halves": {
        "n_routed_experts": 14,
        "n_group": 7,
        "topk_group": 3,
        "rope_interleave": False,
        "n_shared_experts": 3,
        "first_k_dense_replace": 0,
        "rope_parameters": {**MSCALED, "mscale": 1.3, "mscale_all_dim": 0.8},
    },
}
GPT_OSS: Variants = {
    "alternating window, yarn beyond the original length": {},
    "windows by list, odd sizes, tied, top 1": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "num_experts_per_tok": 1,
        "num_local_experts": 5,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "swiglu_alpha": 0.9,
    },
    "plain rope, all experts, a wide window": {
        "num_local_experts": 3,
        "sliding_window": 70,
        "swiglu_limit": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES = {
    "qwen3_moe": QWEN,
    "mixtral": MIXTRAL,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
}
CASES = [(family, name) for family, cases in FAMILIES.items() for name in cases]
STORED = [
    {},
    {"max_shard_size": "40KB"},
    {"old_keys": True},
    {"fused": True},
    {"fused": True, "max_shard_size": "40KB"},
]


def overrides(family: str, name: str) -> dict[str, Any]:
    return FAMILIES[family][name]


@lru_cache(maxsize=4)
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@lru_cache(maxsize=4)
def ours(folder: Path) -> LocalModel:
    spec_experts = LocalModel.load(folder, dtype="float32").spec.num_experts
    split = [list(range(1, spec_experts, 2)), list(range(0, spec_experts, 2))[::-1]]
    return LocalModel.load(folder, dtype="float32", expert_split=split)


def tokens(count: int, seed: int, vocab: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype is torch.float32
    assert 0.5 < expected.abs().max() < 20  # logits of order 1: the tolerance means something
    return (found - expected).abs().max().item()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_of_a_ragged_batch_equal_transformers(
    tiny_checkpoint: Checkpoints, family: str, name: str
) -> None:
    folder = tiny_checkpoint(family, **overrides(family, name))
    sequences = [tokens(count, seed=count) for count in (1, 40, 17, 2, 100)]
    for token_ids, logits in zip(sequences, ours(folder).forward(sequences), strict=True):
        assert difference(logits, oracle(folder).logits(token_ids)) < TOLERANCE


@pytest.mark.parametrize(("family", "name"), CASES)
def test_greedy_tokens_over_64_steps_equal_transformers(
    tiny_checkpoint: Checkpoints, family: str, name: str
) -> None:
    folder = tiny_checkpoint(family, **overrides(family, name))
    prompt = tokens(21, seed=5)
    generated = ours(folder).greedy(prompt, STEPS)
    assert len(generated) == STEPS
    assert generated == oracle(folder).greedy_choices(prompt, generated)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_every_form_of_the_same_checkpoint_gives_the_same_logits(
    tiny_checkpoint: Checkpoints, family: str, stored: dict[str, Any]
) -> None:
    prompt = tokens(30, seed=1)
    plain = tiny_checkpoint(family)
    other = tiny_checkpoint(family, **stored)
    names = {path.name for path in other.glob("*.safetensors")}
    assert ("model.safetensors" in names) == ("max_shard_size" not in stored)
    logits = ours(other).forward([prompt])[0]
    assert torch.equal(logits, ours(plain).forward([prompt])[0])
    assert difference(logits, oracle(plain).logits(prompt)) < TOLERANCE


WINDOWS = [
    ("qwen3_moe", "uneven experts, wide heads"),
    ("mixtral", "window shorter than the prompt"),
    ("deepseek_v2", "yarn beyond the original length, odd heads"),
    ("deepseek_v3", "groups, q-LoRA, a dense layer"),
    ("gpt_oss", "alternating window, yarn beyond the original length"),
]


@pytest.mark.parametrize(("family", "name"), WINDOWS)
def test_sequences_in_pieces_with_scattered_blocks_equal_transformers(
    tiny_checkpoint: Checkpoints, family: str, name: str
) -> None:
    """Prefill in two pieces beside a decode of another sequence, over a shuffled block table."""
    folder = tiny_checkpoint(family, **overrides(family, name))
    model = ours(folder)
    kv = model.new_pool(24)
    table_a, table_b, table_c = [5, 2, 11, 0], [20, 21, 22], [9, 3]
    a, b, c = tokens(50, seed=1), tokens(34, seed=2), tokens(20, seed=3)
    hidden = model.run([SequenceSlice(a[:19], 0, table_a), SequenceSlice(b[:33], 0, table_b)], kv)
    second = [
        SequenceSlice(a[19:49], 19, table_a),
        SequenceSlice(b[33:], 33, table_b),
        SequenceSlice(c, 0, table_c),
    ]
    hidden_2 = model.run(second, kv)
    hidden_3 = model.run([SequenceSlice(a[49:], 49, table_a)], kv)
    rows = {
        "a": torch.cat((hidden[:19], hidden_2[:30], hidden_3)),
        "b": torch.cat((hidden[19:], hidden_2[30:31])),
        "c": hidden_2[31:],
    }
    for key, token_ids in (("a", a), ("b", b), ("c", c)):
        logits = model.attention.logits(rows[key])
        assert difference(logits, oracle(folder).logits(token_ids)) < TOLERANCE, key


@pytest.mark.parametrize(("family", "name"), WINDOWS)
def test_a_prefix_written_in_the_same_pass_can_be_shared(
    tiny_checkpoint: Checkpoints, family: str, name: str
) -> None:
    """B's first two blocks are A's; the slices stand in the less convenient order."""
    folder = tiny_checkpoint(family, **overrides(family, name))
    model = ours(folder)
    prefix = tokens(32, seed=4)
    a, b = prefix + tokens(9, seed=5), prefix + tokens(12, seed=6)
    slices = [SequenceSlice(b[32:], 32, [7, 1, 4]), SequenceSlice(a, 0, [7, 1, 2])]
    logits = model.attention.logits(model.run(slices, model.new_pool(8)))
    assert difference(logits[:12], oracle(folder).logits(b)[32:]) < TOLERANCE
    assert difference(logits[12:], oracle(folder).logits(a)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "qwen2_moe", "afmoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "olmoe",
     "ernie4_5_moe", "hunyuan_v1_moe", "llama4_text"],
)  # fmt: skip
def test_generated_tokens_keep_their_bits_in_any_company(
    tiny_checkpoint: Checkpoints, family: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Alone, beside other generated tokens, and beside a prompt."""
    model = LocalModel.load(tiny_checkpoint(family), dtype=dtype)
    lengths = [3, 1, 40, 64, 17, 90, 65, 16, 33, 5, 2]
    kv, slices = model.new_pool(8 * len(lengths) + 8), []
    for row, length in enumerate(lengths):
        ids, table = tokens(length, seed=row), range(8 * row, 8 * row + 8)
        if length > 1:
            model.run([SequenceSlice(ids[:-1], 0, table)], kv)
        slices.append(SequenceSlice(ids[-1:], length - 1, table))
    prompt = SequenceSlice(tokens(50, seed=99), 0, range(8 * len(lengths), 8 * len(lengths) + 8))
    alone = torch.cat([model.run([each], kv) for each in slices])
    for first in (0, 4, 9):
        assert torch.equal(model.run(slices[first:], kv), alone[first:])
        beside = model.run([*slices[first:], prompt], kv)[: len(lengths) - first]
        assert torch.equal(beside, alone[first:])


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_bfloat16_logits_stay_near_those_of_transformers_in_bfloat16(
    tiny_checkpoint: Checkpoints, family: str
) -> None:
    """Near: our error against float32 is at most 1.5 times theirs (mean over all logits of four
    prompts: where two experts are about equal, either may choose the other one)."""
    folder = tiny_checkpoint(family, dtype="bfloat16")
    theirs_model = Oracle(folder, torch.bfloat16)
    model = LocalModel.load(folder, dtype="auto")
    ours_error, theirs_error = 0.0, 0.0
    for seed in (7, 8, 9, 10):
        prompt = tokens(60, seed=seed)
        exact = oracle(folder).logits(prompt)
        theirs = theirs_model.logits(prompt).float()
        theirs_error += (theirs - exact).abs().mean().item()
        ours_error += (model.forward([prompt])[0] - exact).abs().mean().item()
    assert ours_error < 1.5 * theirs_error
