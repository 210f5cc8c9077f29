"""Modules in the current folder do not shadow this package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.import_path import (
    PACKAGES,
    ROOT,
    module_command,
    shadowed_packages,
    working_directory,
)

HOSTILE = "raise RuntimeError('of the current folder')\n"


def hostile(folder: Path, *packages: str) -> Path:
    for name in packages:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(HOSTILE)
    (folder / "models.py").write_text(HOSTILE)
    return folder


def run(*command: str, cwd: Path, path: str = f"{ROOT}") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.long
def test_command_line_ignores_modules_in_the_current_folder(tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH is the current folder, too."""
    folder = hostile(tmp_path, "contracts", "kernels", "planner", "models")
    command = "from cluster.cli.main import main; main(['--help'])"
    before = "from tandem import remove_shadowing_folders as leave; leave(); "
    done = run("-c", before + command, cwd=folder, path=f":{ROOT}")
    assert "of the current folder" not in done.stderr
    assert "usage: tandem" in done.stdout
    done = run("-c", command, cwd=folder)
    assert "of the current folder" in done.stderr, "without it, they are"


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["-m", "cluster", "--help"], f"{ROOT}"),
        (["-m", "tandem", "--help"], f"{{folder}}:{ROOT}"),
        (module_command("tests.support.rank_process")[1:], ""),
    ],
)
def test_processes_ignore_shadowing_modules(tmp_path: Path, command: list[str], path: str) -> None:
    folder = hostile(tmp_path, "actors", "contracts", "planner")
    done = run(*command, cwd=folder, path=path.format(folder=folder))
    assert (done.returncode, done.stderr) == (0, "")


def test_working_directory_is_restored(tmp_path: Path) -> None:
    before = Path.cwd()
    with working_directory(tmp_path):
        assert Path.cwd() == tmp_path.resolve()
    assert Path.cwd() == before


def test_shadowing_names_are_listed(tmp_path: Path) -> None:
    (tmp_path / "notes.py").touch()
    assert shadowed_packages(tmp_path) == []
    assert shadowed_packages(hostile(tmp_path, "cluster")) == ["cluster", "models.py"]
    assert shadowed_packages(ROOT) == []
    folders = {entry.name for entry in ROOT.iterdir() if (entry / "__init__.py").is_file()}
    assert {*PACKAGES} <= {*folders, "tandem"}
