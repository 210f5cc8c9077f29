"""Import path of worker processes, independent of the current folder.

A `models.py` or a folder `cluster` in the current folder must not shadow this package, in this
process, in Ray's workers or in child processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy")
ROOT = Path(__file__).resolve().parents[1]


def workers_path() -> list[str]:
    """Return the import path entries that Ray's workers need; none if the package is installed."""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return [] if ROOT in installed else [str(ROOT)]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in another process, without the current folder."""
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    path = f"sys.path[:0] = {workers_path()!r}"
    return [sys.executable, "-P", "-c", f"import runpy, sys; {path}; {run}"]


def shadowed_packages(folder: Path) -> list[str]:
    """Return names in `folder` that would shadow packages of ours."""
    if folder.resolve() == ROOT:
        return []
    found = (entry.name for entry in folder.iterdir() if entry.name.removesuffix(".py") in PACKAGES)
    return sorted(found)


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Change the current folder temporarily. Ray passes it to workers."""
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)  # its name may no longer exist
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
