"""Files and records of batches, on any filesystem of fsspec.

    files/file-ID          content
    files/file-ID.json     FileRecord
    batches/batch_ID.json  BatchRecord

A record is written after the content that it names. Folder `work` is always local: unfinished
uploads, and the output of unfinished batches.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import fsspec
import msgspec

from cluster.batch.lines import READ_BYTES, write_whole
from cluster.http.batch_types import ENDED, BatchObject, FileObject
from cluster.http.errors import StorageError
from cluster.http.spans import TraceHeaders
from contracts.errors import ConfigError

Record = TypeVar("Record")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    tenant: bytes
    file: FileObject


StopCode = Literal["batch_cancelled", "batch_expired"]


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, its owner, the lifetime of its results, its trace, and why it ended early."""

    tenant: bytes
    salt: bytes
    batch: BatchObject
    output_lifetime_s: int | None = None
    stop_code: StopCode | None = None
    trace: TraceHeaders = ()


# at import: msgspec crashes if two threads create a type's first decoder at once
_decode_file = msgspec.json.Decoder(FileRecord).decode
_decode_batch = msgspec.json.Decoder(BatchRecord).decode


class LockedError(ConfigError):
    """Another process uses the work folder."""


class Store:
    """Store of one service, which owns the local folder. All methods block.

    Raises StorageError.
    """

    def __init__(self, url: str, work: Path) -> None:
        """Open the store and lock `work`. Raises ConfigError."""
        self.url = url
        self.work = work
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
            self._root = root.rstrip("/")
            self.is_local = "file" in self._fs.protocol
            work.mkdir(parents=True, exist_ok=True, mode=0o700)
            for kind in ("files", "batches"):
                self._fs.makedirs(f"{self._root}/{kind}", exist_ok=True)
            self._lock = (work / ".lock").open("wb")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"batch.storage={url}: cannot be used: {_reason(error)}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise LockedError(
                f"batch.storage={url}: another server uses it; give each its own folder"
            ) from None

    def close(self) -> None:
        self._lock.close()

    def files(self) -> list[FileRecord]:
        with self._storage():
            return list(_records(self._fs, f"{self._root}/files", _decode_file))

    def batches(self) -> list[BatchRecord]:
        with self._storage():
            return list(_records(self._fs, f"{self._root}/batches", _decode_batch))

    def save_batch(self, record: BatchRecord) -> None:
        self._write(f"batches/{record.batch.id}.json", msgspec.json.encode(record))

    def delete_batch(self, batch: str) -> None:
        self._delete(f"batches/{batch}.json")
        shutil.rmtree(self.work / batch, ignore_errors=True)

    def save_file(self, record: FileRecord, content: Path) -> None:
        """Store a local file, which the caller removes afterwards."""
        with self._storage():
            target = self._path(f"files/{record.file.id}")
            if self.is_local:
                Path(target).unlink(missing_ok=True)
                os.link(content, target)
            else:
                self._fs.put_file(str(content), target)
        try:
            self._write(f"files/{record.file.id}.json", msgspec.json.encode(record))
        except StorageError:
            self._delete(f"files/{record.file.id}")
            raise

    def delete_file(self, file: str) -> None:
        self._delete(f"files/{file}.json")
        self._delete(f"files/{file}")

    def read_file(self, file: str, offset: int) -> bytes:
        """Return up to READ_BYTES of the content."""
        with self._storage():
            found: bytes = self._fs.cat_file(
                self._path(f"files/{file}"), start=offset, end=offset + READ_BYTES
            )
            return found

    def local_file(self, file: str, folder: Path) -> Path:
        """Return a local path of the content, downloaded to `folder` if it is not local."""
        with self._storage():
            source = self._path(f"files/{file}")
            if self.is_local:
                Path(source).stat()
                return Path(source)
            target, partial = folder / "input.jsonl", folder / ".input.partial"
            if not target.exists():
                self._fs.get_file(source, str(partial))
                partial.rename(target)
            return target

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, body: bytes) -> None:
        """Write a file atomically: object stores replace objects as a whole."""
        with self._storage():
            if not self.is_local:
                self._fs.pipe_file(self._path(name), body)
                return
            write_whole(Path(self._path(name)), body)

    def _delete(self, name: str) -> None:
        with self._storage(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def _storage(self) -> Iterator[None]:
        """Raise StorageError for errors of any filesystem's package."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001 - of any package
            raise StorageError(f"batch.storage={self.url}: {_reason(error)}") from None


def has_unfinished(url: str) -> bool:
    """Return whether a store has unfinished batches. False if it cannot be read."""
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
        records = _records(filesystem, f"{root.rstrip('/')}/batches", _decode_batch)
        return any(record.batch.status not in ENDED for record in records)
    except Exception:  # noqa: BLE001 - of any package; reported when the service is used
        return False


def _records(filesystem: Any, folder: str, decode: Callable[[bytes], Record]) -> Iterator[Record]:
    """Yield the readable records of a folder, which an object store has only with content."""
    try:
        paths = filesystem.ls(folder, detail=False)
    except FileNotFoundError:
        return
    for path in paths:
        if path.endswith(".json"):
            with contextlib.suppress(msgspec.DecodeError, FileNotFoundError):
                yield decode(filesystem.cat_file(path))


def _reason(error: Any) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
