"""Entry point: `tandem`, or `python -m tandem`.

Other folders on the import path, such as the working directory of a Ray job, may have modules named
as packages of Tandem. This module has a name of its own and imports none of them first.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
PACKAGES = ("contracts", "kernels", "planner", "models", "actors", "cluster", "deploy")


def remove_shadowing_folders() -> None:
    """Remove the current folder, and those with names of Tandem's packages, from the path."""
    try:
        here = os.getcwd()
    except OSError:  # deleted: reported by the command
        here = os.devnull

    def is_kept(entry: str) -> bool:
        folder = os.path.realpath(os.path.join(here, entry))
        paths = [os.path.join(folder, name) for name in PACKAGES]
        found = any(os.path.exists(path) or os.path.exists(f"{path}.py") for path in paths)
        return folder == ROOT or (folder != os.path.realpath(here) and not found)

    sys.path[:] = [entry for entry in sys.path if is_kept(entry)]


def main() -> int:
    remove_shadowing_folders()

    from cluster.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
