"""Our modules come from where this one does, never from the folder that a user stands in, where a
`models.py` or a folder `cluster` may be: here, in Ray's workers and in processes of our own."""

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
    """What Ray's workers need on their import path: nothing, where we are installed. (Before the
    standard library's, which they put it: nothing else may be there.)"""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return [] if ROOT in installed else [str(ROOT)]


def module_command(module: str) -> list[str]:
    """The command that runs a module of ours in another process; `python -m` would look for it in
    the current folder first."""
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    path = f"sys.path[:0] = {workers_path()!r}"
    return [sys.executable, "-P", "-c", f"import runpy, sys; {path}; {run}"]


def shadowed_packages(folder: Path) -> list[str]:
    """The names in `folder` that would be taken for packages of ours there."""
    if folder.resolve() == ROOT:
        return []
    found = (entry.name for entry in folder.iterdir() if entry.name.removesuffix(".py") in PACKAGES)
    return sorted(found)


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """This process's current folder is `folder` inside. Ray hands it to workers, as the folder they
    start in and first on their import path."""
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)  # its name may be gone
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
