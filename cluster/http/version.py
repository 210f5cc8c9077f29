"""Tandem's version, installed or run from a clone."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

DISTRIBUTION = "tandem-moe"


def version() -> str:
    """Of the installed package, else what pyproject.toml beside this package says."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pass
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return "unknown"
    return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
