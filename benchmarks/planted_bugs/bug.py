"""A planted bug: one wrong line, of the kind that is really written."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """`old` occurs once in `file`. tests: files, in the order in which they are tried."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        return self.name.partition(":")[0]
