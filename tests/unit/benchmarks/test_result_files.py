"""Result files: every sample while they are few, quantiles where they would be large."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import CASES, load
from benchmarks.harness import MAX_SAMPLES_BYTES, RESULTS, Result, write_result
from benchmarks.page import PAGE, build_page


def written(folder: Path, samples: dict[str, Any]) -> dict[str, Any]:
    result = Result(name="some", kind="measured", settings={}, samples=samples, summary={})
    found: dict[str, Any] = json.loads(write_result(result, folder / "some.json").read_text())
    kept: dict[str, Any] = found["samples"]
    return kept


def test_few_samples_are_written_as_they_are(tmp_path: Path) -> None:
    samples = {"a": [float(number) for number in range(500)], "b": [{"x": 1, "y": 2.5}] * 20}
    assert written(tmp_path, samples) == samples


@pytest.mark.long
def test_quantiles_stand_for_many_samples(tmp_path: Path) -> None:
    many = [float(number) for number in range(100_001)]
    found = written(tmp_path, {"a": many, "b": [{"x": x, "y": [1, 2]} for x in many], "c": [3, 4]})
    quantiles = {
        "count": 100_001, "mean": 50_000.0, "min": 0.0, "p10": 10_000.0, "p50": 50_000.0,
        "p90": 90_000.0, "max": 100_000.0,
    }  # fmt: skip
    assert found["a"] == quantiles
    assert found["b"]["x"] == quantiles
    assert found["c"] == [3, 4]


def test_no_result_file_has_large_samples() -> None:
    for path in RESULTS.glob("*.json"):
        body = json.loads(path.read_text(encoding="utf-8"))
        assert len(json.dumps(body.get("samples"))) <= MAX_SAMPLES_BYTES, path.name


def test_results_page_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == build_page([load(name) for name in CASES]), (
        "run `python -m benchmarks --page`"
    )


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_options_and_a_question(name: str) -> None:
    case = load(name)
    parser = argparse.ArgumentParser()
    case.add_options(parser)
    assert parser.format_help()
    assert case.question.endswith(".")
