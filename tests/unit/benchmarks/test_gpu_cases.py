"""The GPU's benchmarks of experts that do not fit or are streamed, on a CPU."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import offloaded_on_gpu, slot_kernels, streamed_on_gpu
from benchmarks.harness import Case, run_case
from benchmarks.support.imposed_routing import ImposedRouting
from benchmarks.support.offloaded_report import summarise
from benchmarks.support.random_in_memory import SMALL
from benchmarks.support.streamed_report import executed_flops
from benchmarks.support.streamed_report import summarise as summarise_streamed
from models.experts.expert_layout import ExpertLayout
from models.spec.config_fields import ConfigFields
from models.spec.model import ModelSpec, spec_from

CPU = torch.device("cpu")
ON_CPU = "--device cpu --shape small --dtype float32 "
OFFLOADED = "--layers 3 --threads 1 --tokens 3 --warm 2 --contexts 20 40 --kept 0.5 1.0 --rounds 2"
STREAMED = (
    "--layers 5 --threads 1 --row-tokens 32 --tokens 32 96 --max-tokens 128 --rounds 1 --passes 1"
)


def result_of(case: Case, options: str, folder: Path) -> dict[str, Any]:
    """Return the result file of a run on the CPU, whose threads stay as they are."""
    output, threads = folder / "result.json", torch.get_num_threads()
    run_case(case, shlex.split(f"{ON_CPU}{options} --output {output}"))
    torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["kind"] == "measured"
    return result


def spec_of(layers: int) -> ModelSpec:
    return spec_from(ConfigFields(Path("small"), {**SMALL, "num_hidden_layers": layers}))


@pytest.mark.long
def test_small_run_compares_logits_and_writes_its_result(tmp_path: Path) -> None:
    summary = result_of(offloaded_on_gpu.CASE, OFFLOADED, tmp_path)["summary"]
    kept = ("50%", "100%")
    settings = [f"{part} kept, context {context}" for part in kept for context in (20, 40)]
    assert set(settings) <= set(summary)
    for setting in settings:
        found = summary[setting]
        assert 0 < found["bound_ms"] <= found["on_demand_modelled_ms"]
        assert found["compute_by_bytes_ms"] > 0
        rows = found["variants"]
        assert all(row["tpot_ms"] > 0 for row in rows.values())
        if setting.startswith("100%"):
            assert set(rows) == {"on demand", "there"}
            assert rows["on demand"]["missing_per_token"] == 0
            continue
        missing = {name: row["missing_per_token"] for name, row in rows.items()}
        assert missing["there"] == 0
        assert missing["no cache"] == 3 * 4, "each of three layers wants four"
        assert missing["oracle"] <= 4, "the first layer's alone"
        assert missing["oracle"] < missing["on demand"] < missing["no cache"]


def test_the_kernels_benchmark_runs_where_there_is_no_triton(tmp_path: Path) -> None:
    options = "--tokens 1 3 --rounds 2 --turns 1"
    summary = result_of(slot_kernels.CASE, options, tmp_path)["summary"]
    for tokens in (1, 3):
        for way in ("in slots", "one by one", "grouped"):
            assert summary[f"{tokens} tokens, {way}"]["us"] > 0


@pytest.mark.parametrize("precision", [0.0, 0.9, 1.0])
def test_predictions_have_the_imposed_precision(precision: float) -> None:
    routing = ImposedRouting(spec_of(4), 200, 1, CPU)
    ids_SLK, predicted_SLK = routing.ids_SLK, routing.predicted_routing(precision, CPU)
    assert all(len(set(ids)) == 4 for step in ids_SLK.tolist() for ids in step)
    right = (predicted_SLK.unsqueeze(3) == ids_SLK.unsqueeze(2)).any(3).double().mean()
    assert right == pytest.approx(precision, abs=0.02 if 0 < precision < 1 else 0)
    same = ImposedRouting(spec_of(4), 9, 1, CPU, same=True).ids_SLK
    assert torch.equal(same, same[:1].expand(9, -1, -1))


def test_the_bound_hides_what_is_missing_behind_the_layer_before_but_for_the_first() -> None:
    """Simulated: three layers compute for 1 ms each, an expert is copied in 1 ms. On demand 3 + 5;
    at best 1 + 1, then the larger of 1 and 4, and of 1 and 0."""
    spec = spec_of(3)
    layout = ExpertLayout(spec, torch.float32, CPU, packed=False)
    rates = {"link": layout.num_bytes(1) / 1e-3, "memory": 1e9}
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {
        "50% kept, context 7": {
            "on demand": [turn(8.0, [[1], [4], [0]])],
            "there": [turn(3.0, [[0], [0], [0]])],
            "ahead": [turn(7.0, [[1], [0], [0]])],
        }
    }
    found = summarise(samples, rates, spec, layout)["50% kept, context 7"]
    assert found["compute_ms"] == 3.0
    assert found["on_demand_modelled_ms"] == pytest.approx(8.0)
    assert found["bound_ms"] == pytest.approx(2 + 4 + 1)
    assert found["variants"]["ahead"]["of_bound"] == pytest.approx(1.0)
    assert found["variants"]["ahead"]["over_on_demand"] == pytest.approx(8 / 7)


def turn(tpot_ms: float, missing_LS: list[list[int]]) -> dict[str, Any]:
    return {
        "tpot_ms": tpot_ms,
        "missing_LS": missing_LS,
        "copied_bytes": 10,
        "copied_s": 1.0,
        "exposed_s": 0.0,
        "peak_bytes": 0,
    }


@pytest.mark.long
def test_small_streamed_run_checks_logits_and_writes_its_result(tmp_path: Path) -> None:
    summary = result_of(streamed_on_gpu.CASE, STREAMED, tmp_path)["summary"]
    assert set(summary["points"]) == {"32", "96"}
    for point in summary["points"].values():
        assert point["resident"]["tokens_per_s"] > 0
        assert point["streamed"]["flops_utilization"] > 0
        assert point["hidden_fraction"] <= 1
    assert summary["experts_on_device_fraction"] == 3 / 5
    assert summary["threshold"]["calibrated_tokens"] > 0
    expert = 3 * SMALL["hidden_size"] * SMALL["moe_intermediate_size"]
    assert summary["layer_bytes"] == 4 * SMALL["num_experts"] * expert


def test_summary_of_a_machine_with_copies_as_long_as_a_thousand_tokens() -> None:
    """Simulated: a pass takes 1 ms a token, but streamed never less than its four copies."""
    spec = spec_of(5)
    samples = {
        str(tokens): {
            "resident": [streamed_turn(tokens, ms, 0.0, 0.0)],
            "streamed": [
                streamed_turn(tokens, max(1.0, tokens * 1e-3), 1.0, max(0.0, 1 - tokens * 1e-3))
            ],
        }
        for tokens, ms in ((250, 0.25), (500, 0.5), (2000, 2.0))
    }
    facts = {"calibrated_flops": 1e9, "layer_bytes": 10, "gemm_flops_per_s": 1e12,
             "copy_bytes_per_s": 40.0}  # fmt: skip
    summary = summarise_streamed(samples, facts, spec, torch.float32, 64)
    points, threshold = summary["points"], summary["threshold"]
    assert points["250"]["of_resident"] == 0.25
    assert points["2000"]["of_resident"] == 1.0
    assert points["500"]["hidden_fraction"] == 0.5
    assert points["2000"]["resident"]["flops_utilization"] == pytest.approx(
        1000 * executed_flops(spec, torch.float32, 64) / 1e12
    )
    assert threshold["smallest_at_goal_tokens"] == 2000


def streamed_turn(
    tokens: int, pass_s: float, copied_s: float, waited_s: float
) -> dict[str, object]:
    return streamed_on_gpu.Turn(tokens, [pass_s], copied_s, waited_s, 0)._asdict()
