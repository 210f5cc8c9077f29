"""Version of this package, and its import path, independent of the current folder.

A `models.py` or a folder `cluster` in the current folder must not shadow this package, in this
process, in Ray's workers or in child processes.
"""

import contextlib
import importlib.metadata
import os
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy", "tandem")
ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """Return the version of the installed package, else that of pyproject.toml."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tandem-moe")
    project = ROOT / "pyproject.toml"
    if not project.is_file():
        return "unknown"
    return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def workers_path(here: Path | None = None) -> list[str]:
    """Return the import path entries that Ray's workers need; none if the package is installed.

    here: the working directory of a Ray job, which workers have before installed packages.
    """
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    is_shadowed = here is not None and bool(shadowed_packages(here))
    return [] if ROOT in installed and not is_shadowed else [str(ROOT)]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in another process, without the current folder."""
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    path = f"sys.path[:0] = {workers_path()!r}"
    return [sys.executable, "-P", "-c", f"import runpy, sys; {path}; {run}"]


def shadowed_packages(folder: Path) -> list[str]:
    """Return names in `folder` that would shadow packages of ours."""
    if folder.resolve() == ROOT:
        return []
    try:
        names = os.listdir(folder)
    except PermissionError:  # nor can Python import from it
        return []
    return sorted(name for name in names if name.removesuffix(".py") in PACKAGES)


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Change the current folder temporarily. Ray passes it to workers."""
    with contextlib.ExitStack() as stack:
        try:
            before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)  # its name may no longer exist
            stack.callback(os.close, before)
            stack.callback(os.fchdir, before)
        except PermissionError:  # nor could it be entered again
            stack.callback(os.chdir, "/")
        os.chdir(folder)
        yield
