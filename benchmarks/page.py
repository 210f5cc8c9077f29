"""The results page, generated from the result files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import RESULTS, Case, Result, Table

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
_HEAD = """# Results

Generated from `benchmarks/results/` by `python -m benchmarks --page`; do not edit. The method is in
[benchmarks.md](benchmarks.md). Each section names its command, its machine and the commit.
"""


def build_page(cases: Sequence[Case]) -> str:
    """A section for each case that has a result file."""
    return "\n".join([_HEAD, *(line for case in cases for line in _section(case))])


def results_of(case: Case) -> list[Result]:
    """Results of a case; one case may have several files, for its models or dtypes."""
    names = sorted(RESULTS.glob(f"{case.name}*.json"))
    # By json: some files hold NaN.
    found = [msgspec.convert(json.loads(path.read_text()), Result) for path in names]
    return [one for one in found if one.name.startswith(case.name)]


def _section(case: Case) -> Iterator[str]:
    results = results_of(case)
    if not results:
        return
    yield f"## {case.title}\n"
    kind = "" if case.kind == "measured" else f" ({case.kind})"
    yield f"{case.question} `python -m benchmarks {case.name}`{kind}\n"
    for picture in case.pictures:
        yield f"![{case.title}]({picture})\n"
    for result in results:
        facts = result.environment
        what = result.name.removeprefix(case.name).strip("_").replace("_", " ")
        machine = facts["gpu"] or facts["machine"]
        yield f"{what} ({machine}, commit {facts['commit'][:8]}):\n".lstrip()
        for table in case.tables(result.summary):
            yield from _markdown(table)


def _markdown(table: Table) -> Iterator[str]:
    if table.title:
        yield f"{table.title}:\n"
    yield f"| {' | '.join(table.columns)} |"
    yield f"|---|{'---:|' * (len(table.columns) - 1)}"
    for row in table.rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""
