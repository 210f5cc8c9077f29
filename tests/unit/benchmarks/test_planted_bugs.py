"""The list of planted bugs fits the code: running them all takes minutes, and is a command
(`python -m benchmarks.planted_bugs`; FINDINGS B18)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.planted_bugs import __main__ as runner
from benchmarks.planted_bugs.bug import Bug
from benchmarks.planted_bugs.bugs import BUGS

ROOT = Path(__file__).parents[3]
AREAS = {
    "keys", "capacity", "traces", "logs", "metrics", "scaling",
    "scheduler", "blocks", "sampler", "executor", "dispatch", "router", "journal", "handshake",
    "shares", "lanes", "door", "user policy", "offloading", "foretelling", "replicas",
    "steps", "placement", "counts", "going on", "repair", "adoption", "plan", "doctor",
    "bulk", "resizing",
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_line_that_a_bug_changes_is_there_once(bug: Bug) -> None:
    whole = (ROOT / bug.file).read_text()
    assert whole.count(bug.old) == 1
    compile(whole.replace(bug.old, bug.new), bug.file, "exec")
    assert bug.new != bug.old
    assert bug.tests
    assert all((ROOT / test).is_file() for test in bug.tests)


@pytest.mark.parametrize(
    ("status", "said", "found"),
    [
        (0, "3 passed", ""),
        (1, "FAILED tests/a.py::test_x[1 b] - AssertionError", "tests/a.py::test_x"),
        (-9, "FAILED tests/a.py (no end after 240 s)", "tests/a.py (no end after 240 s)"),
        (1, "ERROR tests/a.py::test_x - TimeoutExpired: at the end of a fixture", None),
        (3, "INTERNALERROR> AttributeError", None),
        (5, "no tests ran", None),
    ],
)
def test_only_a_test_that_fails_or_hangs_finds_a_bug(
    status: int, said: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_forked", lambda tree, test: (status, said))
    if found is not None:
        assert runner.first_failure(ROOT, ["tests/a.py"]) == found
        return
    with pytest.raises(runner.CannotRunError, match=f"ended with {status}"):
        runner.first_failure(ROOT, ["tests/a.py"])


def test_there_are_thirty_bugs_and_three_of_each_area() -> None:
    counts = Counter(bug.area for bug in BUGS)
    assert counts.keys() == AREAS
    assert min(counts.values()) >= 3
    assert len(BUGS) == len({bug.name for bug in BUGS}) >= 30
