"""Entry point: `tandem`, or `python -m tandem`.

Other folders on the import path, such as the working directory of a Ray job, may have modules named
as packages of Tandem. This module has a name of its own and imports none of them first.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy")


def remove_shadowing_folders() -> None:
    """Remove the current folder, and those with names of Tandem's packages, from the path."""

    def is_kept(entry: str) -> bool:
        folder = Path(entry).resolve()
        found = any((folder / n).exists() or (folder / f"{n}.py").exists() for n in PACKAGES)
        return folder == ROOT or (folder != Path.cwd() and not found)

    sys.path[:] = [entry for entry in sys.path if is_kept(entry)]


def main() -> int:
    remove_shadowing_folders()

    from cluster.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
