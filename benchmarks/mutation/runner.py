"""A copy of the tree with one change at a time, tested in forks of this process."""

import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # of one test run: a mutant may hang
SLOW_IMPORTS = ("torch", "hypothesis", "msgspec", "numpy", "pytest", "safetensors.torch")


class Tree:
    """A copy of the tracked files below `folder`."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        for name in SLOW_IMPORTS:
            importlib.import_module(name)
        self.root = folder / "tree"
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=source, check=True, capture_output=True
        )
        for name in listed.stdout.decode().split("\0"):
            path = source / name
            if name and path.is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, self.root / name)

    def fails_with(self, file: str, text: str, tests: Sequence[str]) -> bool:
        """Return whether one of `tests` fails, or does not end, with this text of `file`."""
        path = self.root / file
        original, status = path.read_text(encoding="utf-8"), path.stat()
        self._changes += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (status.st_atime, status.st_mtime + 1000 + self._changes))  # no stale .pyc
        try:
            return self.fails(tests)
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, (status.st_atime, status.st_mtime))

    def fails(self, tests: Sequence[str]) -> bool:
        """Run pytest in a fork. Raises RuntimeError if it neither passes nor fails."""
        output = self.root.parent / "output"
        child = os.fork()
        if child == 0:
            _run_pytest(self.root, tests, output)
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                if code in (0, 1, 2):  # 2: an error at collection
                    return code != 0
                raise RuntimeError(f"{tests} ended with {code}: {output.read_text()[-2000:]}")
            time.sleep(0.05)
        os.killpg(child, 9)
        os.waitpid(child, 0)
        return True


def _run_pytest(root: Path, tests: Sequence[str], output: Path) -> None:
    """Run pytest in the child process; do not return."""
    os.setsid()
    status = 3
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
        sys.path[:] = [str(root), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(root)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not slow"]
        status = int(pytest.main([*tests, *options], plugins=[_WithoutShrinking()]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _WithoutShrinking:
    """A pytest plugin: fixed examples, without shrinking of failing ones."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        usual = settings.get_profile(settings.get_current_profile_name())
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", usual, phases=phases, derandomize=True)
        settings.load_profile("mutation")
