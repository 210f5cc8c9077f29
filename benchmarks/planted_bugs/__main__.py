"""Plants bugs in a copy of this tree, one at a time, and says which test finds each.

    python -m benchmarks.planted_bugs [--only NAME] [--json FILE]

A bug that every test of its list survives is an error: exit status 1. Tests run in forks of this
process, which has imported what takes long and nothing of the tree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.planted_bugs.bug import Bug
from benchmarks.planted_bugs.bugs import BUGS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # of one file of tests: a bug may also hang
SLOW_IMPORTS = ("torch", "hypothesis", "msgspec", "numpy", "pytest", "safetensors.torch", "xdist")
HANGS, TESTS_FAILED = -9, 1
_FAILED = re.compile(r"^FAILED (\S+?::[^\s\[]+|\S+ \(no end.*\))", re.MULTILINE)


class Found(NamedTuple):
    """test: the first that failed; empty if none did."""

    bug: Bug
    test: str
    seconds: float


def main() -> int:
    """0 if every bug was found, 1 if one was not, 2 if tests cannot run, or fail without a bug."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_bugs", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="bugs whose name has TEXT in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.name]
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = copied_tree(Path(folder))
        try:
            found = [plant(tree, bug, place, len(bugs)) for place, bug in enumerate(bugs)]
        except CannotRunError as error:
            print(f"\n{error}", file=sys.stderr)
            return 2
        broken = first_failure(tree, sorted({one.test for one in found if "::" in one.test}))
        if broken:
            print(f"without a bug, {broken} fails too: mend that first", file=sys.stderr)
            return 2
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    return 1 if any(not one.test for one in found) else 0


def copied_tree(folder: Path) -> Path:
    """What git knows of this tree, as it stands."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)
    return tree


def plant(tree: Path, bug: Bug, place: int, bugs: int) -> Found:
    done = round(20 * place / bugs)
    bar = f"[{'#' * done}{'.' * (20 - done)}] {place + 1} of {bugs}: {bug.name}"
    print(f"\r{bar[:110]:<110}", end="", file=sys.stderr, flush=True)
    path, start_s = tree / bug.file, time.monotonic()
    whole, was = path.read_text(), path.stat()
    assert whole.count(bug.old) == 1, f"{bug.name}: {bug.file} has changed, change the list"
    path.write_text(whole.replace(bug.old, bug.new))
    os.utime(path, (was.st_atime, was.st_mtime + 1000 + place))  # no bytecode of before is taken
    try:
        test = first_failure(tree, bug.tests)
    finally:
        path.write_text(whole)
        os.utime(path, (was.st_atime, was.st_mtime))
    if place + 1 == bugs:
        print(file=sys.stderr)
    return Found(bug, test, time.monotonic() - start_s)


class CannotRunError(Exception):
    """A file of tests ended otherwise than by passing or by a failed test: that finds nothing."""


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """The name of the first test that fails, file by file; empty if none does. A test that has no
    end counts, an error of a fixture does not. Raises CannotRunError."""
    for test in tests:
        status, said = run_forked(tree, test)
        failed = _FAILED.search(said)
        if failed is not None and status in (HANGS, TESTS_FAILED):
            return failed[1]
        if status != 0:
            raise CannotRunError(f"{test} ended with {status}: {said[-2000:]}")
    return ""


def run_forked(tree: Path, test: str) -> tuple[int, str]:
    """(exit status, what pytest said) of one file of tests."""
    output = tree.parent / "output"
    child = os.fork()
    if child == 0:
        _run_pytest(tree, test, output)
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return HANGS, f"FAILED {test} (no end after {LIMIT_S:g} s)"


def _run_pytest(tree: Path, test: str, output: Path) -> None:
    """In the child; does not return."""
    os.setsid()
    status = 3
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(tree)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line"]
        status = int(pytest.main([test, *options], plugins=[_WithoutShrinking()]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _WithoutShrinking:
    """A pytest plugin: the first failure is enough, and making its example small takes longer than
    finding it."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        usual = settings.get_profile(settings.get_current_profile_name())
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("without shrinking", usual, phases=phases)
        settings.load_profile("without shrinking")


def table(found: Sequence[Found]) -> str:
    """Markdown."""
    lines = ["| bug | found by |", "|---|---|"]
    for one in found:
        lines.append(f"| {one.bug.name} | {one.test or '**nothing**'} |")
    left = sum(not one.test for one in found)
    return "\n".join([*lines, "", f"{len(found) - left} of {len(found)} found."])


def as_json(found: Sequence[Found]) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip(),
        "kind": "measured",
        "bugs": [
            {"bug": one.bug.name, "file": one.bug.file, "found_by": one.test or None}
            for one in found
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
