"""The wheel works unpacked, first on the path, from an empty folder."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from cluster.http.server import free_port
from tests.architecture.support import PACKAGES, ROOT, tracked_files

BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
COMMANDS = """
import cluster.cli.main as cli
print(cli.__file__)
raise SystemExit(cli.main(["plan", "spec.json", "--json"]) or cli.main(["doctor"]))
"""
SHIPPED = (*PACKAGES, "dashboards", "tandem.py")
OF_A_CLONE = {"deploy/Dockerfile", "deploy/Dockerfile.dockerignore"}  # they copy the clone
DEADLINE_S = 120.0


def sources() -> list[str]:
    """What git tracks of the packages that a wheel is made of, by path from the root."""
    names = (path.relative_to(ROOT).as_posix() for path in tracked_files())
    return [name for name in names if name.partition("/")[0] in SHIPPED]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, without a network: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in [*sources(), "pyproject.toml", "README.md", "LICENSE"]:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    run = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder / "dist" / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def python(site: Path, folder: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints in `folder`, with the wheel first on the path."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_wheel_is_complete(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert set(sources()) - OF_A_CLONE <= held
    foreign = {name.partition("/")[0] for name in held} - set(SHIPPED)
    assert all(name.endswith(".dist-info") for name in foreign), foreign


@pytest.mark.long
def test_commands_run_from_the_wheel(site: Path, tmp_path: Path) -> None:
    spec = {"model": "bundled", "hardware": "h200-node", "sequence_tokens": 64, "devices": 4}
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    where, _, printed = python(site, tmp_path, "-c", COMMANDS).partition("\n")
    assert Path(where).is_relative_to(site)
    plan, end = json.JSONDecoder().raw_decode(printed)
    assert plan["samples_per_s"] > 0
    assert "bundled" in printed[end:]
    assert "serve" in python(site, tmp_path, "-m", "cluster", "--help")
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """A fresh virtual environment with the wheel in it, and what it depends on as it is here."""
    folder = tmp_path / "fresh"
    venv.create(folder, with_pip=True)
    names = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=names))
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("-m", "pip", "install", "--no-deps", "--no-index", wheel)
    subprocess.run([folder / "bin" / "python", *install], check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.ray
def test_server_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "empty"
    folder.mkdir()
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")}
    server = subprocess.Popen(
        [environment / "bin" / "tandem", "serve", "--port", str(port)],
        cwd=folder,
        env={**clean, "PATH": f"{environment / 'bin'}:{clean['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("logs in ")
        assert server.stdout.readline().startswith("ready in ")
        body = {"model": "bundled", "prompt": "The", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=DEADLINE_S).status_code == 200
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE_S) == 0
