"""What every benchmark records besides its samples, and how it is written down."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from benchmarks.random_checkpoint import MEDIUM

RESULTS = Path(__file__).parent / "results"
_NUMBERS = re.compile(r'[\[{]\n(\s+("[^"\n]*": )?[-+.\deE]+,?\n)+\s*[\]}]')
MAX_SAMPLES_BYTES = 100_000  # of a file's samples, as JSON: beyond it quantiles stand for them
_FEW = 12  # samples that quantiles would not make shorter
PACKAGES = ("torch", "ray", "transformers", "msgspec", "numpy")


Kind = Literal["measured", "simulated", "modelled"]


class Result(msgspec.Struct, kw_only=True):
    """One run. `samples`: every raw measurement, by variant, or quantiles of them where they would
    be more than MAX_SAMPLES_BYTES. `summary`: what the table shows."""

    name: str
    kind: Kind
    settings: dict[str, Any]
    samples: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any] = msgspec.field(default_factory=lambda: environment())


def environment() -> dict[str, Any]:
    """Commit, machine and versions, as found."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "commit": commit,
        "python": platform.python_version(),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "versions": versions,
    }


def write_result(result: Result, path: Path | None) -> Path:
    """Writes the result as JSON (default: benchmarks/results/NAME.json); returns the path."""
    path = path or RESULTS / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = msgspec.to_builtins(result)
    if len(json.dumps(body["samples"])) > MAX_SAMPLES_BYTES:
        body["samples"] = shortened(body["samples"])
    path.write_text(dump(body), encoding="utf-8")
    return path


def shortened(samples: Any) -> Any:
    """The same with quantiles in the place of every list of more than a few numbers, or of records,
    of which each field is a list."""
    if isinstance(samples, dict):
        return {name: shortened(some) for name, some in samples.items()}
    if not isinstance(samples, list) or len(samples) <= _FEW:
        return samples
    if all(isinstance(one, int | float) for one in samples):
        return quantiles(samples)
    if all(isinstance(one, dict) and one.keys() == samples[0].keys() for one in samples):
        return {name: shortened([one[name] for one in samples]) for name in samples[0]}
    return [shortened(one) for one in samples]


def quantiles(numbers: Sequence[float]) -> dict[str, float]:
    """What stands for at least two numbers."""
    deciles = statistics.quantiles(numbers, n=10, method="inclusive")
    return {
        "count": len(numbers),
        "mean": statistics.fmean(numbers),
        "min": min(numbers),
        "p10": deciles[0],
        "p50": deciles[4],
        "p90": deciles[8],
        "max": max(numbers),
    }


def dump(body: Any) -> str:
    """Indented JSON in which a list of numbers, and an object of numbers alone, is one line."""
    text = json.dumps(body, indent=1)
    return _NUMBERS.sub(lambda found: _one_line(found[0]), text) + "\n"


def _one_line(numbers: str) -> str:
    flat = re.sub(r"\n\s*", " ", numbers)
    return f"{flat[0]}{flat[2:-2]}{flat[-1]}"


def record(
    name: str,
    options: argparse.Namespace,
    samples: dict[str, Any],
    summary: dict[str, Any],
    model: dict[str, Any] = MEDIUM,
    *,
    kind: Kind = "measured",
) -> None:
    """Writes what was found of `model`, to `options.output` or benchmarks/results/. Paths are
    left out: they are of one machine."""
    said = {name: "" if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings = {**msgspec.to_builtins(said, enc_hook=str), "model": model}
    result = Result(name=name, kind=kind, settings=settings, samples=samples, summary=summary)
    print(f"written: {write_result(result, options.output)}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
