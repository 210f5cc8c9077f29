"""Large files that the workers of a node share, in a private folder.

`open_shared_file` returns a file with a shared lock, which its mapping keeps until the memory is
freed or the process ends. An unlocked file belonged to ended servers, and is deleted when another
file is written.

    PARENT/tandem-UID/    mode 0700, owned by us, not a link
        NAME.bin          complete since it has this name
        NAME.lock         held to check, write or delete NAME.bin
        NAME.partial      being written by the holder of NAME.lock
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from contracts.errors import ResourceError

_POLL_S = 0.1
_WHOLE, _LOCK, _PARTIAL = ".bin", ".lock", ".partial"
_PRIVATE = 0o700


def open_shared_file(
    parent: Path, name: str, size: int, write: Callable[[Path], None], *, deadline_s: float
) -> IO[bytes]:
    """Open the file NAME of `size` bytes for reading and writing.

    The first process creates it with `write(path)`, others wait up to deadline_s. Map it and close
    it, or keep it open: the lock ends with the last of both. Raises OSError; ResourceError if
    others can write to the folder.
    """
    folder = _private_folder(parent)
    with _locked(folder / f"{name}{_LOCK}", deadline_s):
        path = folder / f"{name}{_WHOLE}"
        if not path.is_file() or path.stat().st_size != size:
            path.unlink(missing_ok=True)
            _remove_unused(folder)
            partial = path.with_suffix(_PARTIAL)
            partial.unlink(missing_ok=True)
            write(partial)
            partial.rename(path)
        file = open(path, "r+b", opener=_open_no_link)  # noqa: SIM115  (an opener; it is returned)
        fcntl.flock(file, fcntl.LOCK_SH)  # exclusive locks are held only under NAME.lock
        return file


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _private_folder(parent: Path) -> Path:
    folder = parent / f"tandem-{os.getuid()}"
    parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is a link or a file, not a folder"
    elif found.st_uid != os.getuid():
        wrong = f"belongs to user {found.st_uid}, not to {os.getuid()}"
    elif found.st_mode & 0o077:
        wrong = f"can be entered by others (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
    else:
        return folder
    raise ResourceError(
        f"{folder}: {wrong}; remove it, or set prefill.host_store to another folder"
    )


def _remove_unused(folder: Path) -> None:
    """Delete files that no process has mapped or is writing."""
    for path in [*folder.glob(f"*{_WHOLE}"), *folder.glob(f"*{_PARTIAL}")]:
        with _try_locked(path.with_suffix(_LOCK)) as free:
            if free and _try_lock_file(path):
                path.unlink(missing_ok=True)
                path.with_suffix(_LOCK).unlink(missing_ok=True)


def _try_lock_file(path: Path) -> bool:
    """Return whether the file was not locked."""
    try:
        with path.open("rb") as file:
            return _try_lock(file)
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    give_up_s = time.monotonic() + deadline_s
    while True:
        with _try_locked(path) as free:
            if free:
                yield
                return
        if time.monotonic() > give_up_s:
            raise ResourceError(
                f"{path}: another process has held it for {deadline_s:g} s; raise"
                " groups.ready_timeout_s"
            )
        time.sleep(_POLL_S)


@contextmanager
def _try_locked(path: Path) -> Iterator[bool]:
    """Yield True if the lock was acquired. A deleted lock file does not count."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "r+b") as file:
        if not _try_lock(file):
            yield False
            return
        try:
            current = path.lstat().st_ino
        except FileNotFoundError:
            current = -1
        yield current == os.fstat(file.fileno()).st_ino


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
