"""Import path for `python -m`. Imports no other module of Tandem, which could be a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def remove_current_folder() -> None:
    """Remove the current folder from the import path, unless it is Tandem's own.

    `python -m` and an empty entry of PYTHONPATH put it there.
    """
    here = Path.cwd()
    if here != _ROOT:
        sys.path[:] = [one for one in sys.path if one and Path(one).resolve() != here]
