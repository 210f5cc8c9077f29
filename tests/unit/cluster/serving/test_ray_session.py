"""Which Ray cluster is joined or started, and what happens where that fails; without a cluster."""

import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.serving.ray_session import START_ATTEMPTS, _session_folder, check_cores, ray_session
from cluster.serving.settings import cluster_address, prepare_cluster_environment
from contracts.config import TandemConfig
from contracts.errors import LaunchError
from contracts.loading import load_config
from tests.support.one_line_errors import one_line_error

SLEEP = "import time; time.sleep(60)"


class Ray:
    """Stands for `ray.init`: each start leaves a process; the first `failures` time out."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.started: list[subprocess.Popen[bytes]] = []
        self.folders: list[Path] = []

    def init(self, *, _temp_dir: str, **_: Any) -> None:
        self.folders.append(Path(_temp_dir))
        self.started.append(subprocess.Popen([sys.executable, "-c", SLEEP, f"--dir={_temp_dir}/s"]))
        if len(self.started) <= self._failures:
            raise Exception("The node timed out.\nAnd more.")


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ray]]:
    made: list[Ray] = []

    def start(failures: int) -> Ray:
        made.append(Ray(failures))
        monkeypatch.setattr(ray, "init", made[-1].init)
        context = types.SimpleNamespace(gcs_address="127.0.0.1:1")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        return made[-1]

    yield start
    for process in (process for one in made for process in one.started):
        process.kill()
        process.wait()


def local_session() -> Any:
    return ray_session(TandemConfig(), {}, show_rank_logs=False)


def test_a_local_cluster_that_did_not_start_is_tried_again_and_leaves_nothing(
    starting: Callable[[int], Ray],
) -> None:
    cluster = starting(1)
    with local_session():
        failed, started = cluster.started
        assert not psutil.pid_exists(failed.pid)
        assert started.poll() is None
        assert [folder.exists() for folder in cluster.folders] == [False, True]
    assert not cluster.folders[1].exists()


def test_a_local_cluster_that_never_starts_is_one_line(starting: Callable[[int], Ray]) -> None:
    cluster = starting(START_ATTEMPTS)
    with one_line_error(LaunchError, "did not start, 3 times: The node timed out. ["):
        local_session().__enter__()
    assert not any(psutil.pid_exists(process.pid) for process in cluster.started)
    assert not any(folder.exists() for folder in cluster.folders)


def test_the_ray_address_of_the_configuration_goes_before_that_of_the_environment() -> None:
    there = {"RAY_ADDRESS": "b:1"}
    assert cluster_address(TandemConfig(), {}) is None
    assert cluster_address(TandemConfig(), there) == "b:1"
    assert cluster_address(load_config(None, ["groups.address='a:1'"]), there) == "a:1"
    assert cluster_address(load_config(None, ["groups.address=local"]), there) is None
    assert cluster_address(TandemConfig(), {"RAY_ADDRESS": ""}) is None


def test_ranks_without_cpus_fit_any_machine() -> None:
    check_cores(load_config(None, ["groups.cpus_per_rank=0", "groups.expert_ranks=999"]))


def test_a_cluster_of_our_own_takes_tokens_and_another_is_joined_as_it_is() -> None:
    """Ray listens on all interfaces."""
    ours: dict[str, str] = {}
    prepare_cluster_environment(TandemConfig(), ours)
    assert ours == {"RAY_AUTH_MODE": "token"}
    for given in ({"RAY_ADDRESS": "a:1"}, {"RAY_AUTH_MODE": "disabled"}):
        environment = dict(given)
        prepare_cluster_environment(TandemConfig(), environment)
        assert environment == given


def test_folder_of_ray_is_in_the_shortest_writable_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's root file system may be read-only: TMPDIR is used then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(_session_folder()).parent in (Path("/tmp"), tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert Path(_session_folder()).parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with one_line_error(LaunchError, "set TMPDIR"):
        _session_folder()
