"""Service of files and batches: one process keeps and runs those of a server.

    create ─> validating ─> in_progress ─> finalizing ─> completed
                  │             ├─ cancel ─> cancelling ─> cancelled
                  └> failed     └─ time is up ───────────> expired

The state is in `Store`. A service that starts continues the unfinished batches of its model;
those of other models wait for a server of theirs.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from cluster.batch.files import Files, new_id, page
from cluster.batch.run import ERRORS, OUTPUT, BatchExecution, check_input
from cluster.batch.store import BatchRecord, Store
from cluster.http.batch_types import (
    ENDED,
    BatchBody,
    BatchError,
    BatchErrors,
    BatchList,
    BatchObject,
    DeletedFile,
    FileOwner,
    PageQuery,
    RequestCounts,
)
from cluster.http.errors import ConflictError, StorageError, UnknownObjectError
from cluster.http.row_client import RowClient
from cluster.http.spans import TraceHeaders
from contracts.config import BatchConfig
from contracts.errors import OverloadError, RequestError, TandemError
from contracts.logs import event

log = logging.getLogger("tandem.batch")

RETRY_S = 5.0  # of a batch whose storage or ranks fail
SWEEP_EVERY_S = 10.0
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400


class Batches(Files):
    """Files and batches, on one event loop. Its public methods are those of `BatchCall`.

    connect: returns the client of the ranks, when the first batch runs.
    """

    def __init__(
        self,
        store: Store,
        config: BatchConfig,
        model: str,
        connect: Callable[[], Awaitable[RowClient]],
    ) -> None:
        super().__init__(store, config)
        self._model, self._connect = model, connect
        self._batches: dict[str, BatchRecord] = {}
        self._runs: dict[str, BatchExecution] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(config.in_flight_rows)
        self._checks = asyncio.Semaphore(1)
        self._connecting, self._saving = asyncio.Lock(), asyncio.Lock()
        self._client: RowClient | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Load the records and continue unfinished batches."""
        files = await asyncio.to_thread(self._store.files)
        self._files = {record.file.id: record for record in files}
        batches = await asyncio.to_thread(self._store.batches)
        self._batches = {record.batch.id: record for record in batches}
        for record in batches:
            if _is_open(record) and record.batch.model == self._model:
                self._start(record.batch.id)
        self._sweeping = asyncio.create_task(self._sweep_regularly())

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *filter(None, [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upload in list(self._uploads):
            await self.abort_upload(upload)
        self._store.close()

    async def delete_file(self, owner: FileOwner, file: str) -> DeletedFile:
        for other in self._batches.values():
            if other.batch.input_file_id == file and _is_open(other):
                raise ConflictError(
                    f"id: {file} is the input of {other.batch.id}, which is "
                    f"{other.batch.status}: cancel that first",
                    "id",
                )
        return await super().delete_file(owner, file)

    async def create_batch(
        self, owner: FileOwner, body: BatchBody, trace: TraceHeaders = ()
    ) -> BatchObject:
        window_s = int(body.completion_window[:-1]) * _UNIT_S[body.completion_window[-1]]
        if window_s > MAX_WINDOW_S:
            raise RequestError("completion_window: at most 30d", "completion_window")
        record = self._file(owner, body.input_file_id, "input_file_id")
        if record.file.purpose != "batch":
            raise RequestError(
                "input_file_id: a result of a batch: upload a file of requests", "input_file_id"
            )
        open_batches = [
            other
            for other in self._batches.values()
            if other.tenant == owner.tenant and _is_open(other)
        ]
        if len(open_batches) >= self._config.key_batches:
            raise OverloadError(
                f"{len(open_batches)} batches of this API key are unfinished "
                f"(batch.key_batches={self._config.key_batches}): try again when one has ended",
                60.0,
            )
        now = int(time.time())
        lifetime = body.output_expires_after
        batch = BatchObject(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            model=self._model,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=body.metadata,
        )
        made = BatchRecord(
            tenant=owner.tenant,
            salt=owner.salt,
            batch=batch,
            output_lifetime_s=None if lifetime is None else lifetime.seconds,
            trace=trace,
        )
        self._batches[batch.id] = made
        try:
            await asyncio.to_thread(self._store.save_batch, made)
        except StorageError:
            del self._batches[batch.id]
            raise
        self._start(batch.id)
        return batch

    async def list_batches(self, owner: FileOwner, query: PageQuery) -> BatchList:
        found = [
            self._shown(record)
            for record in self._batches.values()
            if record.tenant == owner.tenant
        ]
        return BatchList(**page(found, query))

    async def get_batch(self, owner: FileOwner, batch: str) -> BatchObject:
        return self._shown(self._batch(owner, batch))

    async def cancel_batch(self, owner: FileOwner, batch: str) -> BatchObject:
        record = self._batch(owner, batch)
        status = record.batch.status
        if status in ENDED or status == "finalizing":
            raise ConflictError(f"id: {batch} is {status} and cannot be cancelled", "id")
        if status != "cancelling":
            await self._update(batch, status="cancelling", cancelling_at=int(time.time()))
            if batch in self._runs:
                self._runs[batch].stop("batch_cancelled")
        if batch not in self._tasks:  # of another model
            self._start(batch)
        return self._shown(self._batches[batch])

    def _batch(self, owner: FileOwner, batch: str) -> BatchRecord:
        record = self._batches.get(batch)
        if record is None or record.tenant != owner.tenant:
            raise UnknownObjectError(f"id: there is no batch {batch[:64]!r}", "id")
        return record

    def _shown(self, record: BatchRecord) -> BatchObject:
        run = self._runs.get(record.batch.id)
        if run is None:
            return record.batch
        return msgspec.structs.replace(record.batch, request_counts=run.counts)

    def _set(self, batch: str, **fields: Any) -> None:
        record = self._batches[batch]
        changed = msgspec.structs.replace(record.batch, **fields)
        self._batches[batch] = msgspec.structs.replace(record, batch=changed)

    async def _update(self, batch: str, **fields: Any) -> None:
        self._set(batch, **fields)
        async with self._saving:  # the latest state, in order
            await asyncio.to_thread(self._store.save_batch, self._batches[batch])

    def _start(self, batch: str) -> None:
        task = self._tasks[batch] = asyncio.create_task(self._run_with_retry(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch, None))

    async def _run_with_retry(self, batch: str) -> None:
        """Run the batch to its end. Failures of storage and ranks are retried until it expires."""
        while True:
            try:
                await self._run(batch)
                return
            except (OSError, TandemError) as error:
                reason = str(error)
                if isinstance(error, OSError):
                    reason = f"batch.storage={self._store.url}: {error.strerror}"
                event(log, "batch_retried", logging.WARNING, batch=batch, reason=reason)
                text = f"{reason}; tried again every {RETRY_S:g} s"
                self._set(
                    batch, errors=BatchErrors(data=[BatchError(code="retried", message=text)])
                )
            except Exception as error:  # noqa: BLE001 - logged, with its traceback
                event(log, "batch_failed", logging.ERROR, error, batch=batch)
                failure = BatchError(code="internal_error", message="internal error")
                await self._fail(batch, [failure])
                return
            await asyncio.sleep(RETRY_S)

    async def _run(self, batch: str) -> None:
        folder = self._store.work / batch
        if self._batches[batch].batch.finalizing_at is None:
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
            path = await self._checked_input(batch, folder)
            if path is None:
                return
            await self._answer(batch, path, folder)
        output = await self._publish(batch, folder / OUTPUT, "output")
        errors = await self._publish(batch, folder / ERRORS, "error")
        status = (self._batches[batch].stop_code or "batch_completed").removeprefix("batch_")
        ended = {"status": status, f"{status}_at": int(time.time()), "errors": None}
        await self._update(batch, **ended, output_file_id=output, error_file_id=errors)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _checked_input(self, batch: str, folder: Path) -> Path | None:
        """Return the local input, checked once; None: the batch has failed."""
        found = self._batches[batch].batch
        try:
            path = await asyncio.to_thread(self._store.local_file, found.input_file_id, folder)
        except FileNotFoundError:
            text = "input_file_id: the content of the file is gone: upload it again"
            gone = BatchError(code="file_gone", message=text, param="input_file_id")
            await self._fail(batch, [gone])
            return None
        if found.in_progress_at is not None:
            return path
        async with self._checks:
            total, errors = await asyncio.to_thread(
                check_input, path, found.endpoint, self._config.requests
            )
        if errors:
            await self._fail(batch, errors)
            return None
        if self._batches[batch].batch.status == "validating":
            self._set(batch, status="in_progress")
        counts = RequestCounts(total=total)
        await self._update(batch, in_progress_at=int(time.time()), request_counts=counts)
        return path

    async def _answer(self, batch: str, path: Path, folder: Path) -> None:
        """Answer the requests until the end, or until the batch is cancelled or expires."""
        self._set(batch, errors=None)  # of the attempt before
        record = self._batches[batch]
        run = self._runs[batch] = BatchExecution(record, path, folder, self._slots)
        left_s = max(0.0, record.batch.expires_at - time.time())
        if record.batch.status == "cancelling":
            run.stop("batch_cancelled")
        elif not left_s:
            run.stop("batch_expired")
        timer = asyncio.get_running_loop().call_later(left_s, run.stop, "batch_expired")
        try:
            await run.run(self._connected)
        finally:
            timer.cancel()
            del self._runs[batch]
            self._set(batch, request_counts=run.counts)
        self._batches[batch] = msgspec.structs.replace(
            self._batches[batch], stop_code=run.stop_code
        )
        if run.stop_code != "batch_cancelled":
            self._set(batch, status="finalizing")
        now = int(time.time())
        await self._update(batch, finalizing_at=now)

    async def _connected(self) -> RowClient:
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _publish(self, batch: str, path: Path, kind: str) -> str | None:
        """Store a file of results under an id that a repetition finds again."""
        file = f"file-{batch.removeprefix('batch_')}-{kind}"
        if file in self._files:
            return file
        size = (await asyncio.to_thread(path.stat)).st_size
        if not size:
            return None
        record = self._batches[batch]
        name, lifetime_s = f"{batch}_{kind}.jsonl", record.output_lifetime_s
        made = self._file_record(record.tenant, name, "batch_output", size, lifetime_s, file)
        await self._save_file(made, path)
        return file

    async def _fail(self, batch: str, errors: list[BatchError]) -> None:
        now = int(time.time())
        if self._batches[batch].batch.status == "cancelling":
            await self._update(batch, status="cancelled", cancelled_at=now)
        else:
            failed = BatchErrors(data=errors)
            await self._update(batch, status="failed", failed_at=now, errors=failed)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self._sweep()
            except TandemError as error:
                event(log, "batch_sweep_failed", logging.WARNING, error=error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _sweep(self) -> None:
        """Delete what is too old, and end batches that expire while their model is not served.

        Save the counts of running batches, to be shown while a successor starts.
        """
        for name, run in list(self._runs.items()):
            await self._update(name, request_counts=run.counts)
        now, kept_s = time.time(), self._config.keep_days * 86400
        inputs = {r.batch.input_file_id for r in self._batches.values() if _is_open(r)}
        await self.delete_expired_files(inputs)
        for record in list(self._batches.values()):
            batch = record.batch
            if _is_open(record):
                if batch.expires_at <= now and batch.id not in self._tasks:
                    self._start(batch.id)
            elif batch.expires_at + kept_s <= now:
                await asyncio.to_thread(self._store.delete_batch, batch.id)
                del self._batches[batch.id]


def _is_open(record: BatchRecord) -> bool:
    return record.batch.status not in ENDED
