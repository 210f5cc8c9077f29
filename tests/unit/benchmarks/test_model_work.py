"""FLOPs and bytes of a pass, against numbers taken by hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.support.model_work import Rates, Work, one_pass
from benchmarks.support.random_checkpoint import MEDIUM, MEDIUM_SHARED, write_random_checkpoint
from models.spec.model import ModelSpec, read_spec


def _spec(folder: Path) -> ModelSpec:
    small = {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 64}
    return read_spec(write_random_checkpoint(folder / "model", {**MEDIUM, **small}))


def test_a_prompts_products_are_projections_causal_pairs_router_and_experts(tmp_path: Path) -> None:
    done = one_pass(_spec(tmp_path), torch.bfloat16, rows=3, new_tokens=5, context=0)
    projections = 512 * (512 + 256 + 256) + 512 * 512
    pairs = 3 * (5 * 6 // 2)
    assert done.attention.flops == 2 * (2 * 15 * (projections + 4 * 512) + 4 * 512 * pairs)
    assert done.expert.flops == 2 * 15 * 4 * 2 * 3 * 512 * 256
    assert done.head.flops == 2 * 3 * 64 * 512


def test_a_decode_step_reads_weights_once_and_each_rows_cache(tmp_path: Path) -> None:
    done = one_pass(_spec(tmp_path), torch.bfloat16, rows=3, new_tokens=1, context=7)
    projections = 512 * (512 + 256 + 256) + 512 * 512
    cache = 3 * 7 * 2 * 256
    assert done.attention.read_bytes == 2 * 2 * (projections + 4 * 512 + cache)
    assert done.expert.read_bytes == 2 * 2 * 4 * 3 * 512 * 256  # top 4 of 4: all of them


def test_dense_and_shared_layers_count_on_the_attention_rank(tmp_path: Path) -> None:
    small = {**MEDIUM_SHARED, "num_hidden_layers": 2, "n_routed_experts": 4, "vocab_size": 64}
    spec = read_spec(write_random_checkpoint(tmp_path / "model", small))
    done = one_pass(spec, torch.float32, rows=1, new_tokens=1, context=0)
    latent = 512 * 8 * 96 + 512 * 160 + 128 * 8 * 128 + 8 * 64 * 512
    mlps = 3 * 512 * 1024 + 3 * 512 * 512 + 4 * 512  # dense layer 0; shared experts, router
    pair = 4 * 8 * 160
    assert done.attention.flops == 2 * (2 * latent + mlps) + 2 * pair
    assert done.expert.flops == 2 * 4 * 3 * 512 * 256  # of one layer


def test_work_takes_as_long_as_the_slower_of_arithmetic_and_reading() -> None:
    rates = Rates(flops_per_s=10.0, read_bytes_per_s=2.0)
    assert Work(20.0, 2.0).seconds(rates) == pytest.approx(2.0)
    assert Work(20.0, 6.0).seconds(rates) == pytest.approx(3.0)
