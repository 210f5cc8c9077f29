"""Shared fixtures. Small on purpose: what one folder of tests needs belongs to that folder."""

import contextlib
import gc
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import tests.support.rank_process
from tests.support import tiny_models
from tests.support.fork_server import fork_server, start_forked
from tests.support.tiny_models import Checkpoints, make_tiny_checkpoint

torch.set_num_threads(1)  # two cores, several workers; and sums that do not depend on the machine

# A busy machine is no failure; and everybody's run tries what everybody else's does.
# More examples of each: `--hypothesis-profile thorough`.
settings.register_profile("same everywhere", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("same everywhere")
QUICK_EXAMPLES = 10  # of a property in `make check`
COMMANDS = "architecture/test_documented_commands", "architecture/test_wheel"
COMPUTING = ("faults", "oracle", "unit/actors", "unit/kernels", "unit/models", *COMMANDS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--family-draws", type=int, default=3, help="random models of each family")
    parser.addoption("--quick", action="store_true", help="no long tests, fewer examples of others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless `-m` names them, and long ones with `--quick`.

    Tests with Ray run first, then those without kernels.
    """
    marks = [] if "slow" in config.option.markexpr else ["slow"]
    if config.option.quick:
        marks.append("long")
        for item in items:
            _limit_examples(item)
    left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: (not _wants_ray(item.nodeid), _computes(item.nodeid)))


def _limit_examples(item: pytest.Item) -> None:
    """Reduce a property's examples to QUICK_EXAMPLES, also if it sets a number of its own."""
    test, cases = getattr(item, "function", None), getattr(item, "cls", None)
    for owner, name in ((test, "_hypothesis_internal_use_settings"), (cases, "settings")):
        own = getattr(owner, name, None)
        if isinstance(own, settings) and own.max_examples > QUICK_EXAMPLES:
            setattr(owner, name, settings(own, max_examples=QUICK_EXAMPLES))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no garbage collection of a test has to look through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With `-n`, files run beside each other, but one Ray cluster at a time."""
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        return "ray" if _wants_ray(nodeid) else nodeid.partition("::")[0]


def _computes(nodeid: str) -> bool:
    return nodeid.removeprefix("tests/").startswith(COMPUTING)


def _wants_ray(nodeid: str) -> bool:
    return nodeid.startswith(("tests/ray/", "tests/net/"))


@pytest.fixture(scope="session")
def forked_processes() -> Iterator[None]:
    """For tests that start processes with `tests.support.fork_server`."""
    fork_server().start()
    yield
    fork_server().close()


@pytest.fixture
def ranks_are_forked(forked_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test starts as processes come without the seconds of an import."""
    start_forked(monkeypatch, tests.support.rank_process)


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Checkpoints:
    """tiny_checkpoint(family, **overrides) -> folder, written once per set of arguments.

    Shared by the session: copy the folder before changing anything in it. Copies of what an earlier
    session wrote with the same versions save the import of the models of `transformers`.
    """
    made: dict[str, Path] = {}
    cache = getattr(request.config, "cache", None)
    store = None if cache is None else cache.mkdir("tiny_checkpoints")
    versions = [Path(tiny_models.__file__).read_text(encoding="utf-8")]
    versions += map(importlib.metadata.version, ("torch", "transformers", "safetensors"))

    def make(family: str = "qwen3_moe", **overrides: Any) -> Path:
        key = json.dumps([family, overrides, versions], sort_keys=True)
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp(family)
            stored = store and store / sha256(key.encode()).hexdigest()
            if stored is not None and stored.is_dir():
                return shutil.copytree(stored, folder, dirs_exist_ok=True)
            make_tiny_checkpoint(folder, family, **overrides)
            if stored is not None:
                with tempfile.TemporaryDirectory(dir=store, ignore_cleanup_errors=True) as place:
                    shutil.copytree(folder, Path(place) / "new")
                    with contextlib.suppress(OSError):  # another worker has stored it
                        (Path(place) / "new").rename(stored)
        return made[key]

    return make
