"""What every benchmark records besides its samples, and how it is written down."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from benchmarks.random_checkpoint import MEDIUM

RESULTS = Path(__file__).parent / "results"
_NUMBERS = re.compile(r'[\[{]\n(\s+("[^"\n]*": )?[-+.\deE]+,?\n)+\s*[\]}]')
PACKAGES = ("torch", "ray", "transformers", "msgspec", "numpy")


class Result(msgspec.Struct, kw_only=True):
    """One run. `samples`: every raw measurement, by variant. `summary`: what the table shows."""

    name: str
    kind: Literal["measured", "simulated", "modelled"]
    settings: dict[str, Any]
    samples: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any] = msgspec.field(default_factory=lambda: environment())


def environment() -> dict[str, Any]:
    """Commit, machine and versions, as found."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {}
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
    path.write_text(dump(msgspec.to_builtins(result)), encoding="utf-8")
    return path


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
) -> None:
    """Writes what was measured on `model`, to `options.output` or benchmarks/results/. Paths are
    left out: they are of one machine."""
    said = {name: "" if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings = {**msgspec.to_builtins(said, enc_hook=str), "model": model}
    result = Result(name=name, kind="measured", settings=settings, samples=samples, summary=summary)
    print(f"written: {write_result(result, options.output)}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
