"""Prefill on a GPU: what moves weights gives the bits of what does not, and the GPU the CPU's
results within the rounding of bfloat16."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.cases import streamed_on_gpu
from benchmarks.harness import run_case
from kernels import fused_ops
from kernels.attention import plan_on_device
from kernels.experts import RoutingRule, gated
from kernels.fused_ops import apply_rope
from kernels.fused_ops import rms_norm_by_torch as rms_norm
from kernels.gpu_experts import gpu_experts
from kernels.linear import linears
from kernels.paged_attention import attention_kernels, supports_packed
from kernels.pages import Pages, Seen
from models.decoder.batch import AttentionBatch, SequenceSlice
from tests.support.kernel_reference import (
    attention_reference,
    experts_reference,
    layout,
    ragged_attention,
)
from tests.support.local_model import LocalModel
from tests.support.tiny_models import Checkpoints

GPU = torch.device("cuda", 0)
# Sizes that all fused kernels take.
ALIGNED = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "moe_intermediate_size": 32,
}
SMALL_RUN = (
    "--device cuda:0 --shape small --layers 6 --row-tokens 128 --tokens 1024 4096 --rounds 1"
    " --max-tokens 8192"
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_fused_passes_are_torchs_operations_but_for_rounding() -> None:
    pytest.importorskip("triton")
    assert fused_ops._triton_kernels() is not None  # else the log says why
    T, H, d, D = 300, 36, 128, 2048
    x_TD = torch.randn(T, D, device=GPU).bfloat16()
    weight_D = torch.randn(D, device=GPU).bfloat16()
    qkv = torch.randn(T, H + 4, d, device=GPU).bfloat16()
    weight_Hd, angles = qkv[0, :H].contiguous(), torch.randn(T, 1, d // 2, device=GPU)
    turn = angles.cos().bfloat16(), angles.sin().bfloat16()
    rows_N = torch.randint(T, (900,), device=GPU)
    normed = rms_norm(qkv[:, :H], weight_Hd, 1e-6)
    pairs = [
        (fused_ops.rms_norm(x_TD, weight_D, 1e-6), rms_norm(x_TD, weight_D, 1e-6)),
        (fused_ops.norm_and_rope(qkv[:, :H], weight_Hd, 1e-6, *turn), apply_rope(normed, *turn)),
        (fused_ops.norm_and_rope(qkv[:, :H], None, 1e-6, *turn), apply_rope(qkv[:, :H], *turn)),
        (fused_ops.gated(x_TD), gated(x_TD)),
        (fused_ops.gather_rows(x_TD, rows_N), x_TD[rows_N]),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, atol=5e-2, rtol=2e-2)
        assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize("window", [0, 3, 600])
@pytest.mark.parametrize("shapes", [[(5, 0), (40, 0)], [(5, 0), (1, 900), (7, 4), (1, 9), (3, 30)]])
def test_attention_of_a_batch_equals_the_reference(
    shapes: list[tuple[int, int]], window: int
) -> None:
    """In one packed call, or over pages in triton's kernels."""
    generator, laid = torch.Generator().manual_seed(1), layout(shapes, 16)
    G, R, d = 2, 3, 16
    k_pool, v_pool = (
        torch.randn(laid.pool_slots, G, d, generator=generator).bfloat16() for _ in "kv"
    )
    q_THd = torch.randn(sum(n for n, _ in shapes), G * R, d, generator=generator).bfloat16()
    assert supports_packed(torch.bfloat16, GPU, d)
    pages = Pages(laid.pages.blocks_BW.to(GPU), 16)
    plan = plan_on_device(
        laid.sequences, pages, Seen(window), GPU, group=R, packed=True, expands=False
    )
    assert (plan.packed is None) == any(start for _, start in shapes)
    assert attention_kernels(q_THd.to(GPU)) is not None
    new = (pool[laid.new_slots].to(GPU) for pool in (k_pool, v_pool))
    pools = k_pool.to(GPU), v_pool.to(GPU)
    out_THd = ragged_attention(q_THd.to(GPU), *new, *pools, plan, scale=0.3).cpu()
    for seq, held in zip(laid.sequences, laid.slots, strict=True):
        rows = slice(seq.first, seq.first + seq.count)
        expected = attention_reference(
            q_THd[rows],
            k_pool[held],
            v_pool[held],
            start=seq.start,
            scale=0.3,
            window=window or None,
        )
        torch.testing.assert_close(out_THd[rows].double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(("dtype", "F"), [(torch.bfloat16, 32), (torch.bfloat16, 5), (None, 32)])
def test_experts_equal_the_reference_and_have_the_same_bits_in_every_run(
    dtype: torch.dtype | None, F: int
) -> None:
    """In one grouped product, and with odd sizes or in float32 one by one."""
    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(2)
    T, D, E, top_k = 50, 64, 9, 3
    x_TD = torch.randn(T, D, generator=generator).to(dtype)
    gate_up, down = (
        (torch.randn(E, *s, generator=generator) / 8).to(dtype) for s in ((2 * F, D), (D, F))
    )
    logits_TE = torch.randn(T, E, generator=generator)
    logits_TE[:, 4] = -100.0  # nobody's expert
    ids_TK, weights_TK = RoutingRule(E, top_k, normalize=True).choose(logits_TE)
    pairs = [
        (t, int(ids_TK[t, k]), float(weights_TK[t, k])) for t in range(T) for k in range(top_k)
    ]
    layers = [linears(weight.to(GPU)) for weight in (gate_up, down)]
    runs = [
        gpu_experts(x_TD.to(GPU), ids_TK.to(GPU), weights_TK.to(GPU), layers[0], layers[1])
        for _ in range(3)
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    expected = experts_reference(x_TD, gate_up, down, pairs)
    rounding = 3e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(runs[0].cpu().double(), expected, atol=rounding, rtol=rounding)


def test_nothing_between_layers_waits_for_the_gpu(tiny_checkpoint: Checkpoints) -> None:
    """torch tells of every operation that would wait."""
    model = LocalModel.load(tiny_checkpoint("qwen3_moe", **ALIGNED), dtype="bfloat16", device=GPU)
    if torch.cuda.get_device_capability(GPU)[0] not in (9, 10):
        pytest.skip("torch's grouped product waits for the counts on this GPU")
    kv, ids = model.new_pool(16), list(range(3, 80))
    with torch.inference_mode():
        model.run([SequenceSlice(ids, 0, range(8))], kv)
        half, batch = model.attention, [SequenceSlice(ids, 0, range(8))]
        inputs = AttentionBatch.build(batch, block_tokens=16, device=GPU)
        half.prepare(inputs)
        hidden_TD = half.embed(inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for layer in range(model.spec.num_layers):
                attended = half.attend(layer, hidden_TD, inputs, kv)
                assert attended.routed is not None
                model._add_experts(layer, attended.hidden_TD, attended.routed)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_logits_are_the_cpus_within_the_rounding_of_bfloat16(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe", **ALIGNED)
    prompts = [list(range(3, 120)), list(range(40, 47))]
    with torch.inference_mode():
        wanted = LocalModel.load(folder, dtype="float32").forward(prompts)
        exact = LocalModel.load(folder, dtype="float32", device=GPU).forward(prompts)
        rounded = LocalModel.load(folder, dtype="bfloat16", device=GPU).forward(prompts)
        on_cpu = LocalModel.load(folder, dtype="bfloat16").forward(prompts)
    for reference, same, near, as_near in zip(wanted, exact, rounded, on_cpu, strict=True):
        torch.testing.assert_close(same.cpu(), reference, atol=2e-3, rtol=2e-3)
        # Routing may go another way in a few rows: the CPU's own rounding says how far that is.
        error, usual = (near.cpu() - reference).abs().mean(), (as_near - reference).abs().mean()
        assert error < 2 * usual + 1e-3


def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    """It fails if streamed logits are not the resident ones, bit for bit."""
    output = tmp_path / "result.json"
    run_case(streamed_on_gpu.CASE, shlex.split(f"{SMALL_RUN} --output {output}"))
    summary = json.loads(output.read_text())["summary"]
    assert summary["peak_bytes"]["resident"] > 0
    for point in summary["points"].values():
        assert 0 <= point["hidden_fraction"] <= 1
