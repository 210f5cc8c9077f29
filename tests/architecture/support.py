"""Files and syntax trees for the architecture tests."""

import ast
import functools
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


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return path → syntax tree of the packages' modules."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
