"""What the architecture tests look at: tracked files, their syntax trees, the metrics in use."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy")


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git tracks, or without git all that are not hidden or built."""
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
    """Syntax trees of our packages' modules, by path from the root."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
