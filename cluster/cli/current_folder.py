"""For `python -m`: imports nothing else of ours, which could come from the wrong place."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def remove_current_folder() -> None:
    """Takes the current folder off the import path, where `python -m` and an empty entry of
    PYTHONPATH put it, unless our packages are there."""
    here = Path.cwd()
    if here != _ROOT:
        sys.path[:] = [one for one in sys.path if one and Path(one).resolve() != here]
