"""Plants a bug in each part that repairs, in a copy of this tree, and has chaos find it.

    python -m benchmarks.chaos.planted [--only NAME]

Each schedule also runs without its bug, and must find nothing then. Exit status 1: a bug was not
found, or something that is none. What the result's file says of other bugs stays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos.verdict import quantile
from benchmarks.harness import RESULTS, Result, write_result
from benchmarks.planted_bugs.__main__ import copied_tree
from benchmarks.planted_bugs.bug import Bug

LIMIT_S = 280.0
NO_END = f"no end within {LIMIT_S:g} s"
_LIGHT = ("--light", "--until-wrong")
_QUICK = (*_LIGHT, "--request-timeout", "30")
_ATTENTION = ("--schedule", "kill attention-0,kill attention-1,kill attention-0", *_LIGHT)
_EXPERT = ("--schedule", "kill expert-0,kill expert-1,kill expert-0", *_QUICK)
# The other expert rank is stopped for a moment: neither has answered at the kill.
_BOTH = "stop expert-1 0.2+kill expert-0,stop expert-0 0.2+kill expert-1"
_EXPERTS = ("--schedule", f"{_BOTH},{_BOTH}", "--until-wrong", "--request-timeout", "30")
SURVIVED_S = 1.0  # the next token after an expert rank's kill at the median, where others survive
_WAKES = ("--schedule", "wake attention-0,wake attention-1", *_LIGHT)
_LAUNCHER = ("--served", "--schedule", "kill expert-0,kill launcher-0,kill expert-0", *_LIGHT)


class Planted(NamedTuple):
    """arguments: of chaos, which find it. within_s: the next token after an expert rank's kill, at
    the median."""

    bug: Bug
    arguments: Sequence[str]
    within_s: float = math.inf


class Found(NamedTuple):
    """failures: what chaos said with the bug, and without it."""

    planted: Planted
    failures: list[str]
    without: list[str]


def _bug(name: str, file: str, old: str, new: str, arguments: Sequence[str]) -> Planted:
    return Planted(Bug(name, file, old, new, ()), arguments)


BUGS = (
    _bug(
        "epoch check: a rank that has been replaced is let in",
        "actors/channels/link_setup.py",
        "if epoch < newest:",
        "if epoch < 0:",
        _WAKES,
    ),
    _bug(
        "resend: what a lost expert rank has not answered is not sent again",
        "actors/moe/remote_pending.py",
        "            if piece.rank == rank:\n                self.hold(piece)",
        "            if piece.rank == rank:\n                continue",
        _EXPERT,
    ),
    _bug(
        "resend: what is cut anew answers for another part of its token group",
        "actors/moe/remote_pending.py",
        "first_group + len(slices),",
        "piece.token_group,",
        _EXPERTS,
    )._replace(within_s=SURVIVED_S),
    _bug(
        "sampler state: draws begin anew on the rank that goes on",
        "actors/batching/sampler.py",
        "uniform(sequence.seed, sequence.generated)",
        "uniform(sequence.seed, len(sequence.token_ids) - len(sequence.submit.token_ids))",
        _ATTENTION,
    ),
    _bug(
        "sampler state: penalties forget what another rank has generated",
        "actors/batching/logits_processor.py",
        "self._noted = submit.prompt_tokens",
        "self._noted = len(submit.token_ids)",
        _ATTENTION,
    ),
    _bug(
        "adoption: a rank that was replaced is not written down",
        "cluster/fleet/fleet_store.py",
        "if body != self._written and",
        "if not self._written and",
        _LAUNCHER,
    ),
    _bug(
        "adoption: epochs begin anew with another launcher",
        "cluster/fleet/adoption.py",
        "token, epoch = record.token, entry.epoch",
        "token, epoch = record.token, 1",
        _LAUNCHER,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.planted", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="bugs whose name has TEXT in it")
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/chaos_planted.json"
    )
    options = parser.parse_args()
    bugs = [one for one in BUGS if options.only in one.bug.name]
    with tempfile.TemporaryDirectory(prefix="chaos-planted-") as folder:
        tree = copied_tree(Path(folder))
        found = [_found(tree, one, place, len(bugs)) for place, one in enumerate(bugs)]
    print(table(found))
    settings = {one.bug.name: " ".join(one.arguments) for one in BUGS}
    path = options.output or RESULTS / "chaos_planted.json"
    told = _others(path, bugs) | {
        one.planted.bug.name: {"found": one.failures, "none": one.without} for one in found
    }
    write_result(
        Result(name="chaos_planted", kind="measured", settings=settings, samples={}, summary=told),
        path,
    )
    return 1 if any(one.without or not one.failures for one in found) else 0


def _others(path: Path, bugs: Sequence[Planted]) -> dict[str, Any]:
    """What was said of those that are not among these."""
    told: dict[str, Any] = json.loads(path.read_text())["summary"] if path.exists() else {}
    these = {one.bug.name for one in bugs}
    known = {one.bug.name for one in BUGS}
    return {name: said for name, said in told.items() if name in known - these}


def _found(tree: Path, one: Planted, place: int, bugs: int) -> Found:
    bar = f"[{'#' * place}{'.' * (bugs - place)}] {place + 1} of {bugs}: {one.bug.name}"
    print(bar, file=sys.stderr, flush=True)
    path = tree / one.bug.file
    whole = path.read_text()
    assert whole.count(one.bug.old) == 1, f"{one.bug.file} has changed, change the list"
    without = failures(tree, one)
    path.write_text(whole.replace(one.bug.old, one.bug.new))
    try:
        return Found(one, failures(tree, one), without)
    finally:
        path.write_text(whole)


def failures(tree: Path, one: Planted) -> list[str]:
    """What a chaos run in that tree says, and how late tokens came if that was too late."""
    output, log = tree.parent / "chaos.json", tree.parent / "chaos.log"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.chaos", *one.arguments]
    files = ["--output", str(output), "--log", str(log)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [*command, *files], cwd=tree, env=environment, start_new_session=True
    ) as chaos:
        try:
            status = chaos.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(chaos.pid, 9)
            return [NO_END, *_written(output, one.within_s)]
    return _written(output, one.within_s) or ([] if status == 0 else [f"it ended with {status}"])


def _written(output: Path, within_s: float) -> list[str]:
    if not output.exists():
        return []
    report: dict[str, Any] = json.loads(output.read_text())
    told = [str(line)[:300] for line in report["summary"]["failures"]]
    return told + late(report["samples"], within_s)


def late(samples: dict[str, dict[str, list[float]]], within_s: float) -> list[str]:
    """Whether the stream that waits longest waits for more than that, at the median."""
    waits_s = samples.get("kill expert", {}).get("last_token", [])
    if not waits_s or (median_s := quantile(waits_s, 0.5)) <= within_s:
        return []
    return [f"kill expert: the next token after {median_s:.2f} s, and not within {within_s:g} s"]


def table(found: Sequence[Found]) -> str:
    """Markdown."""
    lines = ["| planted | what chaos said | without it |", "|---|---|---|"]
    for one in found:
        told = one.failures[0] if one.failures else "**nothing**"
        without = one.without[0] if one.without else "nothing"
        lines.append(f"| {one.planted.bug.name} | {told} | {without} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
