"""Files of a batch service: uploads in pieces, reading, deletion, lifetimes."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from cluster.batch.store import FileRecord, Store
from cluster.http.batch_types import (
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
    FileOwner,
    PageQuery,
)
from cluster.http.errors import ConflictError, StorageError, UnknownObjectError
from contracts.config import BatchConfig
from contracts.errors import RequestError, TooCostlyError

Listed = TypeVar("Listed", FileObject, BatchObject)
ABANDONED_UPLOAD_S = 600.0


class _Upload:
    def __init__(self, owner: FileOwner, path: Path) -> None:
        self.owner, self.path = owner, path
        self.file: BinaryIO = path.open("wb")
        self.size = 0
        self.written_s = time.monotonic()


class Files:
    """Files of all owners. Belongs to one event loop; `store` is used in threads."""

    def __init__(self, store: Store, config: BatchConfig) -> None:
        self._store, self._config = store, config
        self._files: dict[str, FileRecord] = {}
        self._uploads: dict[str, _Upload] = {}

    async def begin_upload(self, owner: FileOwner) -> str:
        used = sum(r.file.bytes for r in self._files.values() if r.tenant == owner.tenant)
        if used >= self._config.key_bytes:
            raise TooCostlyError(
                f"file: the files of this API key have {used} bytes, at most "
                f"{self._config.key_bytes} are kept (batch.key_bytes): delete some",
                "file",
            )
        name = new_id("upload-")
        with self._writing():
            self._uploads[name] = _Upload(owner, self._store.work / name)
        return name

    async def write_upload(self, upload: str, data: bytes) -> None:
        found = self._upload(upload)
        found.size += len(data)
        found.written_s = time.monotonic()
        if found.size > self._config.file_bytes:
            raise TooCostlyError(
                f"file: larger than {self._config.file_bytes} bytes (batch.file_bytes)", "file"
            )
        with self._writing():
            await asyncio.to_thread(found.file.write, data)

    async def end_upload(
        self, upload: str, filename: str, expires_after_s: int | None
    ) -> FileObject:
        found = self._upload(upload)
        with self._writing():
            await asyncio.to_thread(found.file.close)
        record = self._file_record(
            found.owner.tenant, filename, "batch", found.size, expires_after_s
        )
        await self._save_file(record, found.path)
        await self.abort_upload(upload)
        return record.file

    async def abort_upload(self, upload: str) -> None:
        found = self._uploads.pop(upload, None)
        if found is not None:
            await asyncio.to_thread(_discard, found)

    def _upload(self, upload: str) -> _Upload:
        if upload not in self._uploads:
            raise ConflictError("file: the upload was interrupted: send it again", "file")
        return self._uploads[upload]

    def _file_record(
        self,
        tenant: bytes,
        filename: str,
        purpose: Literal["batch", "batch_output"],
        size: int,
        expires_after_s: int | None,
        file: str | None = None,
    ) -> FileRecord:
        now = int(time.time())
        return FileRecord(
            tenant=tenant,
            file=FileObject(
                id=file or new_id("file-"),
                bytes=size,
                created_at=now,
                expires_at=None if expires_after_s is None else now + expires_after_s,
                filename=filename,
                purpose=purpose,
            ),
        )

    async def _save_file(self, record: FileRecord, content: Path) -> None:
        await asyncio.to_thread(self._store.save_file, record, content)
        self._files[record.file.id] = record

    async def list_files(self, owner: FileOwner, query: PageQuery) -> FileList:
        found = [
            record.file
            for record in self._files.values()
            if record.tenant == owner.tenant and query.purpose in (None, record.file.purpose)
        ]
        return FileList(**page(found, query))

    async def get_file(self, owner: FileOwner, file: str) -> FileObject:
        return self._file(owner, file, "id").file

    async def read_file(self, owner: FileOwner, file: str, offset: int) -> bytes:
        record = self._file(owner, file, "id")
        try:
            return await asyncio.to_thread(self._store.read_file, record.file.id, offset)
        except FileNotFoundError:
            raise UnknownObjectError(f"id: the content of {file} is gone", "id") from None

    async def delete_file(self, owner: FileOwner, file: str) -> DeletedFile:
        record = self._file(owner, file, "id")
        await self._delete_file(record.file.id)
        return DeletedFile(id=file)

    async def _delete_file(self, file: str) -> None:
        await asyncio.to_thread(self._store.delete_file, file)
        self._files.pop(file, None)

    def _file(self, owner: FileOwner, file: str, param: str) -> FileRecord:
        record = self._files.get(file)
        if record is None or record.tenant != owner.tenant:
            raise UnknownObjectError(f"{param}: there is no file {file[:64]!r}", param)
        return record

    async def delete_expired_files(self, inputs: set[str]) -> None:
        """Delete files whose lifetime is over, except `inputs`, and abandoned uploads."""
        now, kept_s = time.time(), self._config.keep_days * 86400
        for record in list(self._files.values()):
            file = record.file
            expires_at = file.expires_at or file.created_at + kept_s
            if expires_at <= now and file.id not in inputs:
                await self._delete_file(file.id)
        for name, upload in list(self._uploads.items()):
            if time.monotonic() - upload.written_s > ABANDONED_UPLOAD_S:
                await self.abort_upload(name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"batch.storage={self._store.url}: {error.strerror}") from None


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def page(found: list[Listed], query: PageQuery) -> dict[str, Any]:
    """Return the fields of one page of a list, the latest first unless order=asc.

    Raises RequestError if `after` is not in the list.
    """
    found.sort(key=lambda one: (one.created_at, one.id), reverse=query.order == "desc")
    first = 0
    if query.after is not None:
        first = next((at for at, one in enumerate(found, 1) if one.id == query.after), 0)
        if not first:
            raise RequestError(f"after: {query.after[:64]!r} is not in this list", "after")
    shown, has_more = found[first : first + query.limit], len(found) > first + query.limit
    first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
    return {"data": shown, "first_id": first_id, "last_id": last_id, "has_more": has_more}


def _discard(upload: _Upload) -> None:
    with contextlib.suppress(OSError):
        upload.file.close()
    upload.path.unlink(missing_ok=True)
