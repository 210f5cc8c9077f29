"""The folder of shared files is private, and unused files are deleted."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch

from contracts.errors import ResourceError
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import HostSource, open_host_source
from models.experts.shared_file import open_shared_file
from models.weights.checkpoint import check_checkpoint

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[4]
HOLD = """
import mmap, pathlib, signal, sys
from models.experts.shared_file import open_shared_file
write = lambda path: path.write_bytes(b"theirs")
with open_shared_file(pathlib.Path(sys.argv[1]), "theirs", 6, write, deadline_s=30.0) as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
signal.pause()
"""
OURS = f"tandem-{os.getuid()}"


def open_named(parent: Path, name: str, *, text: bytes = b"experts") -> IO[bytes]:
    def write(path: Path) -> None:
        path.write_bytes(text)

    return open_shared_file(parent, name, len(text), write, deadline_s=DEADLINE_S)


def mapped(parent: Path, name: str) -> mmap.mmap:
    """Return a mapping of the closed file, as in a worker."""
    with open_named(parent, name) as file:
        return mmap.mmap(file.fileno(), 0)


def names(parent: Path) -> set[str]:
    return {path.name for path in (parent / OURS).iterdir() if path.suffix != ".lock"}


def planted_link(at: Path) -> None:
    (at.parent / "elsewhere").mkdir(mode=0o700)
    at.symlink_to(at.parent / "elsewhere")


def planted_open_folder(at: Path) -> None:
    at.mkdir()
    at.chmod(0o777)


@pytest.fixture
def open_default(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], HostSource]:
    """Return a function that opens experts in the default store, below tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tiny_checkpoint("qwen3_moe", dtype="bfloat16")
    layout = ExpertLayout(check_checkpoint(folder), torch.float32, torch.device("cpu"))
    return lambda: open_host_source(folder, layout, store=None, deadline_s=DEADLINE_S)


def test_default_store_folder_is_private(
    open_default: Callable[[], HostSource], tmp_path: Path
) -> None:
    open_default().close()
    assert stat.S_IMODE((tmp_path / OURS).lstat().st_mode) == 0o700
    assert len(list((tmp_path / OURS).glob("*.bin"))) == 1


@pytest.mark.parametrize(
    ("plant", "message"),
    [(planted_link, "is a link"), (planted_open_folder, "mode 0777"), (Path.touch, "or a file")],
)
def test_unsafe_store_folder_is_rejected(
    open_default: Callable[[], HostSource],
    tmp_path: Path,
    plant: Callable[[Path], None],
    message: str,
) -> None:
    plant(tmp_path / OURS)
    with pytest.raises(ResourceError, match=r"prefill\.host_store") as caught:
        open_default()
    assert message in str(caught.value)
    assert str(tmp_path / OURS) in str(caught.value)
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_folder_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"tandem-{os.getuid() + 1}").mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ResourceError, match=f"belongs to user {owner}, not to {owner + 1}"):
        open_named(tmp_path, "a")


def test_unused_files_are_deleted_when_another_is_written(tmp_path: Path) -> None:
    mapped(tmp_path, "old").close()
    (tmp_path / OURS / "killed.partial").write_bytes(b"half")
    used = mapped(tmp_path, "used")
    assert names(tmp_path) == {"used.bin"}
    new = mapped(tmp_path, "new")
    assert names(tmp_path) == {"used.bin", "new.bin"}
    assert used[:] == b"experts"
    used.close()
    mapped(tmp_path, "new").close()  # exists: nothing is written or deleted
    assert names(tmp_path) == {"used.bin", "new.bin"}
    new.close()


def test_file_mapped_by_another_process_stays_until_it_ends(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        mapped(tmp_path, "mine").close()
        assert names(tmp_path) == {"theirs.bin", "mine.bin"}
        other.kill()
    mapped(tmp_path, "next").close()
    assert names(tmp_path) == {"next.bin"}


def test_first_process_creates_file_and_others_wait(tmp_path: Path) -> None:
    made: list[int] = []
    met = threading.Barrier(3)

    def write(path: Path) -> None:
        made.append(1)
        path.write_bytes(b"experts")

    def worker() -> None:
        met.wait(DEADLINE_S)
        open_shared_file(tmp_path, "a", 7, write, deadline_s=DEADLINE_S).close()

    threads = [threading.Thread(target=worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert made == [1]


def test_slow_writer_raises_error_in_waiting_process(tmp_path: Path) -> None:
    def slow(path: Path) -> None:
        with pytest.raises(ResourceError, match=r"a\.lock.*groups\.ready_timeout_s"):
            open_shared_file(tmp_path, "a", 7, path.touch, deadline_s=0.0)  # type: ignore[arg-type]
        path.write_bytes(b"experts")

    open_shared_file(tmp_path, "a", 7, slow, deadline_s=DEADLINE_S).close()
