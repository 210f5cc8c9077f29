"""Files and syntax trees for the architecture tests."""

import ast
import functools
import gc
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy")


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Return files that git tracks; without git all that are not hidden."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
        found = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = [p for p in ROOT.rglob("*") if not any(q.startswith(".") for q in p.parts)]
    return tuple(path for path in found if path.is_file())


def parse(path: Path) -> ast.Module:
    """Return a file's tree, which no garbage collection looks through from then on."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return path → syntax tree of the packages' modules."""
    return {
        path.relative_to(ROOT).as_posix(): parse(path)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
