"""What the benchmark of gathered experts makes of its samples."""

from __future__ import annotations

import pytest

from benchmarks.cases.gather_overlap import MODEL, SWEEP
from benchmarks.support.gather_report import summarise
from benchmarks.support.prefill_pair import Pass, Round
from benchmarks.support.random_checkpoint import write_random_checkpoint
from models.spec.model import ModelSpec, read_spec

TRANSFER_S = 0.25


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    small = {**MODEL, "num_experts": 4, "vocab_size": 64, "num_hidden_layers": 3}
    return read_spec(write_random_checkpoint(tmp_path_factory.mktemp("model"), small))


def round_of(number: int, pass_s: float, *, wait_s: float = 0.0, cpu_s: float = 1.0) -> Round:
    gathered = Pass(512, pass_s, wait_s, gather_s=2 * TRANSFER_S, gathers=2)
    return Round(number, [gathered, gathered], cpu_s, 1024)


def test_rates_are_compared_within_a_round(spec: ModelSpec) -> None:
    """On a machine that takes three times as long from round to round."""
    samples = {
        "resident": [round_of(number, 3.0**number) for number in range(1, 4)],
        "gathered": [
            round_of(number, 1.25 * 3.0**number, wait_s=0.05, cpu_s=1.1) for number in range(1, 4)
        ],
        "all_to_all": [round_of(2, 2.5 * 3.0**2)],
    }
    found = summarise({"overlap": samples}, spec, 512)["overlap"]
    assert found["gathered"]["of_resident"] == pytest.approx(0.8)
    assert found["gathered"]["cpu_of_resident"] == pytest.approx(1.1)
    assert found["gathered"]["hidden_fraction"] == pytest.approx(0.9)
    assert found["gathered_over_all_to_all"] == pytest.approx(2.0)


def test_the_measured_threshold_is_eq_1s_where_passes_wait_for_transfers_alone(
    spec: ModelSpec,
) -> None:
    """A pass over 3 layers waits for 2 transfers, or computes at a rate that differs by sweep: of
    the last layer hardly anything."""
    row_s = (0.1, 0.12, 0.08)
    samples = {
        str(rows): {
            "resident": [round_of(n, rows * s) for n, s in enumerate(row_s)],
            "gathered": [round_of(n, max(rows * s, 2 * TRANSFER_S)) for n, s in enumerate(row_s)],
        }
        for rows in SWEEP
    }
    calibrated = {"saturation_flops": [10**9, 10**9]}
    found = summarise({"threshold": samples, "calibrated": calibrated}, spec, 512)["threshold"]
    assert found["measured_over_eq1"] == pytest.approx(1.0, rel=1e-6)
    assert found["measured_tokens"] == pytest.approx(2 * TRANSFER_S / 0.1 * 512)
    assert found["transfer_s"] == pytest.approx(TRANSFER_S)
