"""The harness of all benchmarks: command line, result file, tables and the results page.

A benchmark is a `Case` in a module of benchmarks/cases/: options, a measurement and the tables of
its summary. `python -m benchmarks NAME` runs it, prints the tables and writes
benchmarks/results/NAME.json; `python -m benchmarks --page` rebuilds docs/results.md from the files.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

RESULTS = Path(__file__).parent / "results"
MAX_SAMPLES_BYTES = 100_000  # of a file's samples as JSON; larger ones are replaced by quantiles
PACKAGES = ("torch", "ray", "transformers", "msgspec", "numpy")
_MAX_LISTED = 12  # samples that quantiles would not make shorter
_NUMBERS = re.compile(r'[\[{]\n(\s+("[^"\n]*": )?[-+.\deE]+,?\n)+\s*[\]}]')

Kind = Literal["measured", "simulated", "modelled"]


class Table(NamedTuple):
    """Columns after the first hold figures and are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Measured(NamedTuple):
    """samples: every raw measurement, by variant. summary: what the tables show. settings: facts
    of the run beside its options. suffix: of the result file's name."""

    samples: dict[str, Any]
    summary: dict[str, Any]
    settings: dict[str, Any] = {}
    suffix: str = ""


def _no_options(_: argparse.ArgumentParser) -> None:
    pass


class Case(NamedTuple):
    """One benchmark. question: one sentence, what it answers. measure: raises RuntimeError where
    variants disagree in their answers. pictures: paths below docs/ that the page shows."""

    name: str
    title: str
    question: str
    measure: Callable[[argparse.Namespace], Measured]
    tables: Callable[[dict[str, Any]], Sequence[Table]]
    add_options: Callable[[argparse.ArgumentParser], None] = _no_options
    kind: Kind = "measured"
    pictures: Sequence[str] = ()


def documented_case(
    document: str | None,
    title: str,
    measure: Callable[[argparse.Namespace], Measured],
    tables: Callable[[dict[str, Any]], Sequence[Table]],
    add_options: Callable[[argparse.ArgumentParser], None] = _no_options,
    **more: Any,
) -> Case:
    """A case with the name of its module; its question is the first paragraph of `document`."""
    question = " ".join((document or "").split("\n\n")[0].split())
    return Case(
        measure.__module__.rpartition(".")[2], title, question, measure, tables, add_options, **more
    )


class Result(msgspec.Struct, kw_only=True):
    """Content of a result file. samples: quantiles where they would exceed MAX_SAMPLES_BYTES."""

    name: str
    kind: Kind
    settings: dict[str, Any]
    samples: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any] = msgspec.field(default_factory=lambda: environment())


def run_case(case: Case, arguments: Sequence[str]) -> None:
    """Measure, print the tables and write the result file."""
    options = options_of(case, arguments)
    load_before = os.getloadavg()
    measured = case.measure(options)
    print_tables(case.tables(measured.summary))
    result = Result(
        name=case.name + measured.suffix,
        kind=case.kind,
        settings={
            "load_average_before": load_before,
            **plain_options(options),
            **measured.settings,
        },
        samples=msgspec.to_builtins(measured.samples),
        summary=measured.summary,
    )
    print(f"written: {write_result(result, options.output)}")


def options_of(case: Case, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a case. Exits with status 2 for wrong ones."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {case.name}",
        description=case.question,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    case.add_options(parser)
    parser.add_argument("--output", type=Path, help="result file (default: benchmarks/results/)")
    return parser.parse_args(arguments)


def plain_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON, without paths of this machine."""
    plain = {
        name: "" if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    body: dict[str, Any] = msgspec.to_builtins(plain, enc_hook=str)
    return body


def print_tables(tables: Sequence[Table]) -> None:
    """Print plain aligned columns: a machine with a GPU may lack rich."""
    for table in tables:
        lines = [table.columns, *table.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{table.title}" if table.title else "")
        for first, *rest in lines:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            print("  ".join([first.ljust(widths[0]), *cells]))


def table_of(
    summary: dict[str, Any], title: str = "", first: str = "", columns: Sequence[str] = ()
) -> Table:
    """A row for each object in `summary`, a column for each of its plain fields (or `columns`)."""
    records = {name: row for name, row in summary.items() if isinstance(row, dict)}
    fields = columns or list(
        dict.fromkeys(
            field
            for row in records.values()
            for field, value in row.items()
            if isinstance(value, int | float | str)
        )
    )
    rows = [
        [name, *(_cell(row.get(field, "")) for field in fields)]
        for name, row in records.items()
        if any(field in row for field in fields)
    ]
    return Table(title, [first, *(field.replace("_", " ") for field in fields)], rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:,.4g}"
    return f"{value}"


def environment() -> dict[str, Any]:
    """Commit, machine and package versions."""
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
    """Write the result as JSON (default: benchmarks/results/NAME.json); return the path."""
    path = path or RESULTS / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = msgspec.to_builtins(result)
    if len(json.dumps(body["samples"])) > MAX_SAMPLES_BYTES:
        body["samples"] = shortened(body["samples"])
    path.write_text(dump(body), encoding="utf-8")
    return path


def shortened(samples: Any) -> Any:
    """Replace each long list of numbers, and each field of a long list of records, by quantiles."""
    if isinstance(samples, dict):
        return {name: shortened(some) for name, some in samples.items()}
    if not isinstance(samples, list) or len(samples) <= _MAX_LISTED:
        return samples
    if all(isinstance(one, int | float) for one in samples):
        return quantiles(samples)
    if all(isinstance(one, dict) and one.keys() == samples[0].keys() for one in samples):
        return {name: shortened([one[name] for one in samples]) for name in samples[0]}
    return [shortened(one) for one in samples]


def quantiles(numbers: Sequence[float]) -> dict[str, float]:
    """Summary of at least two numbers."""
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
    """Indented JSON in which a list of numbers, or an object of numbers only, is one line."""
    text = json.dumps(body, indent=1)
    return _NUMBERS.sub(lambda found: _one_line(found[0]), text) + "\n"


def _one_line(numbers: str) -> str:
    flat = re.sub(r"\n\s*", " ", numbers)
    return f"{flat[0]}{flat[2:-2]}{flat[-1]}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
