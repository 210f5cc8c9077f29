"""The GPU's benchmark of streamed experts, the same way on a CPU."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.cases import streamed_on_gpu
from benchmarks.harness import run_case
from benchmarks.support.crossing import crossing
from benchmarks.support.random_in_memory import SMALL
from benchmarks.support.streamed_report import executed_flops, summarise
from models.spec.config_fields import ConfigFields
from models.spec.model import spec_from

SMALL_RUN = (
    "--device cpu --shape small --dtype float32 --layers 5 --hidden 64 --experts 8 --threads 1"
    " --row-tokens 32 --tokens 32 96 --max-tokens 128 --rounds 1 --passes 1"
)


def test_small_run_checks_logits_and_writes_its_result(tmp_path: Path) -> None:
    output, threads = tmp_path / "result.json", torch.get_num_threads()
    run_case(streamed_on_gpu.CASES[0], shlex.split(f"{SMALL_RUN} --output {output}"))
    torch.set_num_threads(threads)
    result = json.loads(output.read_text())
    summary = result["summary"]
    assert result["kind"] == "measured"
    assert set(summary["points"]) == {"32", "96"}
    for point in summary["points"].values():
        assert point["resident"]["tokens_per_s"] > 0
        assert point["streamed"]["flops_utilization"] > 0
        assert point["hidden_fraction"] <= 1
    assert summary["experts_on_device_fraction"] == 3 / 5
    assert summary["threshold"]["calibrated_tokens"] > 0
    assert summary["layer_bytes"] == 4 * 8 * 3 * 64 * SMALL["moe_intermediate_size"]


def test_summary_of_a_machine_with_copies_as_long_as_a_thousand_tokens() -> None:
    """Simulated: a pass takes 1 ms a token, but streamed never less than its four copies."""
    spec = spec_from(ConfigFields(Path("small"), {**SMALL, "num_hidden_layers": 5}))
    samples = {
        str(tokens): {
            "resident": [turn(tokens, tokens * 1e-3, 0.0, 0.0)],
            "streamed": [turn(tokens, max(1.0, tokens * 1e-3), 1.0, max(0.0, 1 - tokens * 1e-3))],
        }
        for tokens in (250, 500, 2000)
    }
    facts = {"calibrated_flops": 1e9, "layer_bytes": 10, "gemm_flops_per_s": 1e12,
             "copy_bytes_per_s": 40.0}  # fmt: skip
    summary = summarise(samples, facts, spec, torch.float32, 64)
    points, threshold = summary["points"], summary["threshold"]
    assert points["250"]["of_resident"] == 0.25
    assert points["2000"]["of_resident"] == 1.0
    assert points["500"]["hidden_fraction"] == 0.5
    assert points["2000"]["resident"]["flops_utilization"] == pytest.approx(
        1000 * executed_flops(spec, torch.float32, 64) / 1e12
    )
    assert threshold["transfer_s"] == 0.25
    assert threshold["measured_tokens"] == pytest.approx(1000)
    assert threshold["eq1_tokens"] == pytest.approx(1000)
    assert threshold["smallest_at_goal_tokens"] == 2000


def turn(tokens: int, pass_s: float, copied_s: float, waited_s: float) -> dict[str, object]:
    return streamed_on_gpu.Turn(tokens, [pass_s], copied_s, waited_s, 0)._asdict()


def test_a_curve_crosses_a_level_between_its_points_or_beyond_them() -> None:
    assert crossing(1.5, [(0, 0), (1, 1), (2, 2)]) == 1.5
    assert crossing(4.0, [(2, 2), (1, 1)]) == 4.0
