"""The planted bugs of the mutation command apply to the code as it is."""

from collections import Counter

from benchmarks.mutation.__main__ import read_bugs
from benchmarks.mutation.runner import ROOT


def test_each_planted_bug_replaces_text_that_occurs_once() -> None:
    counts = {
        bug.name: (ROOT / bug.file).read_text(encoding="utf-8").count(bug.old)
        for bug in read_bugs()
    }
    assert counts == dict.fromkeys(counts, 1)


def test_planted_bugs_have_distinct_names_and_existing_tests() -> None:
    assert max(Counter(bug.name for bug in read_bugs()).values()) == 1
    missing = {test for bug in read_bugs() for test in bug.tests if not (ROOT / test).is_file()}
    assert not missing
