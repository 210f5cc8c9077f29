"""Experts in slots of a GPU's memory, the others copied from pinned memory when they are wanted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.moe.backend import TaskKey
from benchmarks.cases import offloaded_on_gpu
from benchmarks.harness import options_of, run_case
from contracts.plan import Plan
from contracts.requests import Priority
from kernels import fused_ops
from kernels.experts import gated
from kernels.gpu_experts import slot_experts, supports_slots
from kernels.linear import plain_linears
from models.experts.device_lanes import CudaLane
from models.experts.expert_half import RoutedTokens
from tests.support.group_harness import PrefillThreads, greedy, prefill_config
from tests.support.tiny_models import Checkpoints, prompts

GPU = torch.device("cuda", 0)
SHARED_MEMORY = Path("/dev/shm")
# Sizes that all fused kernels take.
ALIGNED = {"hidden_size": 64, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_a_copy_waits_for_the_compute_and_the_compute_for_a_copy() -> None:
    """Both are queued faster than they run."""
    lane, size = CudaLane(GPU), 1 << 22
    stored = [torch.full((size,), float(n), pin_memory=True) for n in range(20)]
    slot, sums = torch.zeros(size, device=GPU), []
    after = None
    for source in stored:
        copied = lane.copy([source], [slot], after)
        lane.wait(copied)
        work = slot.view(2048, 2048)
        for _ in range(5):
            work = (work @ work).clamp(0, 1)
        sums.append((slot.double().mean() + 0 * work.double().mean()).clone())
        after = lane.mark()
    assert [round(float(each)) for each in sums] == list(range(20))
    assert lane.copies == len(stored)
    assert lane.copied_s > 0.0
    lane.drain()


def test_ids_copied_to_host_equal_ids_at_request() -> None:
    lane, ids = CudaLane(GPU), torch.zeros(8, 8, dtype=torch.int64, device=GPU)
    work = torch.rand(4096, 4096, device=GPU)
    fetches = []
    for _ in range(10):
        for _ in range(5):
            work = (work @ work).clamp(0, 1)
        ids = ids + 1
        fetches.append(lane.fetch(ids))
    torch.cuda.synchronize()
    assert all(each.is_ready for each in fetches)
    assert [int(each.tensor[3, 3]) for each in fetches] == list(range(1, 11))


@pytest.mark.parametrize(("D", "F"), [(64, 32), (2048, 768), (72, 40)])
def test_experts_in_slots_are_their_products(D: int, F: int) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(3, D, generator=generator).to(GPU).bfloat16()
    assert fused_ops.fused_kernels(x_TD) is not None  # else the log says why
    gate_up, down = (
        (torch.randn(6, *s, generator=generator) * s[1] ** -0.5).to(GPU).bfloat16()
        for s in ((2 * F, D), (D, F))
    )
    slots_TK = torch.tensor([[5, -1], [0, 5], [3, 3]], dtype=torch.int32, device=GPU)
    y_ND = torch.full((6, D), 7.0, device=GPU).bfloat16()
    assert supports_slots(x_TD, slots_TK, plain_linears(gate_up), None)
    slot_experts(x_TD, slots_TK, plain_linears(gate_up), plain_linears(down), y_ND)
    for n, slot in enumerate(slots_TK.flatten().tolist()):
        x_1D = x_TD[n // 2 :][:1]
        expected = gated(x_1D @ gate_up[slot].t()) @ down[slot].t()
        if slot < 0:
            expected = torch.full_like(expected, 7.0)
        torch.testing.assert_close(y_ND[n : n + 1], expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_and_hints_change_no_bit(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: str
) -> None:
    """Equal batches; the tokens are those of a resident worker in float32."""
    folder, found, generated = tiny_checkpoint("qwen3_moe", **ALIGNED), [], []
    modes: list[dict[str, Any]] = [{"slots": 1000, "predictor": "none"}, {"slots": 4}, {"slots": 9}]
    for experts in (None, *modes):
        prefill = {"experts": "resident" if experts is None else "cached"}
        prefill["host_store"] = str(SHARED_MEMORY / "tandem-test")
        config = prefill_config(prefill=prefill, experts=experts or {}, model={"dtype": dtype})
        with PrefillThreads(folder, config, device="cuda:0") as group, group.client() as client:
            sequences = prompts(5, [5, 19, 130, 1])
            scored = [
                client.scored(client.submit(s, candidates=list(range(131)))) for s in sequences
            ]
            tokens = [client.generated(client.submit(s, sampling=greedy(12)))[0] for s in sequences]
        if experts is None:
            near, expected = torch.tensor([each.candidate_logits for each in scored]), tokens
        else:
            found.append(torch.tensor([each.candidate_logits for each in scored]))
            generated.append(tokens)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert generated[0] == generated[1] == generated[2]
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(found[0], near, atol=tolerance, rtol=tolerance)
    if dtype == "float32":
        assert generated[0] == expected


def test_the_host_waits_for_ids_alone(tmp_path: Path) -> None:
    """torch tells of every operation of its own that would wait; looking at an event does not."""
    options = options_of(offloaded_on_gpu.CASE, ["--shape", "small", "--layers", "3"])
    bench = offloaded_on_gpu.Bench(options)
    with bench.variants(0.5, ["on demand"]) as variants:
        backend, spec = variants["on demand"].backend, bench.spec
        x_TD = torch.randn(1, spec.hidden_size, device=GPU).bfloat16()
        weights_TK = torch.full((1, spec.top_k), 1.0 / spec.top_k, device=GPU)
        for turn in range(6):
            ids_TK = torch.arange(spec.top_k, device=GPU)[None] + turn % 3
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if turn > 2 else "default")
            try:
                for layer in spec.moe_layers:
                    key = TaskKey(turn, layer, 0, Priority.LS, True)
                    routed = RoutedTokens(x_TD, ids_TK, weights_TK)
                    pending = backend.dispatch(key, x_TD, routed, Plan())
                    for _ in backend.combine(x_TD.clone(), pending, None):
                        pass
            finally:
                torch.cuda.set_sync_debug_mode("default")
    bench.close()


def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--shape", "small", "--rounds", "1", "--output", str(output)]
    run_case(offloaded_on_gpu.CASE, arguments)
    assert output.exists()
