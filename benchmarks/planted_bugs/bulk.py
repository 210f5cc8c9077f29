"""Jobs that go on after any crash."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_OUTPUT = "cluster/tools/bulk/output.py"
_RESUME = ("tests/property/test_bulk_resume.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "bulk: a ledger is written on behind half a line",
        _OUTPUT,
        "    os.truncate(ledger, size)\n",
        "",
        _RESUME,
    ),
    Bug(
        "bulk: rejected rows of an unfinished window stay",
        _OUTPUT,
        "    os.truncate(rejected, expected)\n",
        "",
        _RESUME,
    ),
    Bug(
        "bulk: a journal is written on behind half a line",
        "cluster/tools/bulk/journal.py",
        "        self._file.truncate(size)\n",
        "",
        _RESUME,
    ),
)
