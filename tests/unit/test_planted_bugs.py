"""The list of planted bugs fits the code: running them all takes minutes, and is a command
(`python -m benchmarks.planted_bugs`; FINDINGS B18)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.planted_bugs.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
AREAS = {
    "scheduler", "blocks", "sampler", "executor", "dispatch", "router", "journal", "handshake",
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_line_that_a_bug_changes_is_there_once(bug: Bug) -> None:
    whole = (ROOT / bug.file).read_text()
    assert whole.count(bug.old) == 1
    compile(whole.replace(bug.old, bug.new), bug.file, "exec")
    assert bug.new != bug.old
    assert bug.tests
    assert all((ROOT / test).is_file() for test in bug.tests)


def test_there_are_thirty_bugs_and_three_of_each_area() -> None:
    counts = Counter(bug.area for bug in BUGS)
    assert counts.keys() == AREAS
    assert min(counts.values()) >= 3
    assert len(BUGS) == len({bug.name for bug in BUGS}) >= 30
