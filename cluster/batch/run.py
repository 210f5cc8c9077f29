"""Execution of one batch.

    input.jsonl ── requests ──> RowClient ── answers ──> output.jsonl   status 200
                                                         errors.jsonl   other statuses, not sent

The two files are the journal: the id of each line names the request's line in the input, and a
request with a line in either file is never sent again. After a crash an incomplete last line is cut
off; its request, and those that were under way, are sent again.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from cluster.batch.lines import MAX_LINE_BYTES, SeenIds, split_lines, sync
from cluster.batch.store import BatchRecord, StopCode
from cluster.http.batch_types import BatchError, RequestCounts
from cluster.http.row_client import RowClient, RowReply
from contracts.errors import first_error
from contracts.json_input import wrong_field
from contracts.requests import Caller

MAX_ERRORS = 50  # of an input file, reported
MAX_CUSTOM_ID_CHARACTERS = 512
IDS_AT_ONCE = 4096
# Requests under way, which a lost process repeats: 20 losses repeat at most 0.5 % of a large batch.
MIN_IN_FLIGHT_ROWS = 32
IN_FLIGHT_FRACTION = 1 / 4000
LINES_AT_ONCE = 256
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
SYNC_EVERY_S = 1.0

_STOPPED: dict[StopCode, str] = {
    "batch_cancelled": "This request was not answered before the batch was cancelled.",
    "batch_expired": "This request was not answered before the batch expired.",
}


class RequestLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _NotSent(msgspec.Struct, frozen=True):
    code: str
    message: str


class _ResultLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _NotSent | None = None


class _LineId(msgspec.Struct, frozen=True):
    id: str


# at import: msgspec crashes if two threads create a type's first decoder at once
_decode_line = msgspec.json.Decoder(RequestLine).decode
_decode_id = msgspec.json.Decoder(_LineId).decode
_decode_body = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def rows_in_flight(total: int) -> int:
    return max(MIN_IN_FLIGHT_ROWS, int(total * IN_FLIGHT_FRACTION))


def read_requests(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the numbers, from 1, and texts of lines that are not blank; None: too long."""
    with path.open("rb") as file:
        for number, line in enumerate(split_lines(file.read), start=1):
            if line is None or line.strip():
                yield number, line


def check_input(path: Path, endpoint: str, max_requests: int) -> tuple[int, list[BatchError]]:
    """Return the number of requests and the first errors of an input file."""
    errors: list[BatchError] = []
    seen, ids, numbers = SeenIds(), list[str](), list[int]()
    total = 0

    def check_ids() -> None:
        for number, custom_id, is_new in zip(numbers, ids, seen.add(ids), strict=True):
            if not is_new:
                text = f"custom_id: {custom_id[:64]!r} occurs twice: give each line its own"
                errors.append(_error("duplicate_custom_id", text, number, "custom_id"))
        ids.clear()
        numbers.clear()

    for number, text in read_requests(path):
        total += 1
        line = _checked_line(number, text, endpoint)
        if isinstance(line, BatchError):
            errors.append(line)
        else:
            ids.append(line.custom_id)
            numbers.append(number)
        if len(ids) >= IDS_AT_ONCE:
            check_ids()
        if len(errors) >= MAX_ERRORS or total > max_requests:
            break
    check_ids()
    if total > max_requests:
        message = f"more than {max_requests} requests (batch.requests): split the file"
        errors.insert(0, _error("too_many_requests", message, None, None))
    if not total:
        errors.append(_error("empty_file", "the input file has no requests", None, None))
    return total, sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]


def _checked_line(number: int, text: bytes | None, endpoint: str) -> RequestLine | BatchError:
    if text is None:
        return _error("line_too_long", f"longer than {MAX_LINE_BYTES} bytes", number, None)
    try:
        line = _decode_line(text)
        _decode_body(line.body)
    except msgspec.ValidationError as error:
        field, reason = wrong_field(str(error))
        return _error("invalid_request", f"{field or 'body'}: {reason}", number, field or "body")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _error("invalid_json_line", f"not valid JSON: {error}", number, None)
    if line.url != endpoint:
        reason = f"url: {line.url[:64]!r} is not the batch's endpoint {endpoint}"
        return _error("mismatched_endpoint", reason, number, "url")
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        reason = f"custom_id: give 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
        return _error("invalid_custom_id", reason, number, "custom_id")
    return line


def _error(code: str, message: str, line: int | None, param: str | None) -> BatchError:
    return BatchError(code=code, message=message, line=line, param=param)


class ResultFiles:
    """The open output and error files of a batch, and the number of lines in each.

    prefix: of the ids of lines.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        """Open the files and cut off incomplete lines. Blocks. Raises OSError."""
        self.completed = self.failed = 0
        self._prefix = prefix
        self._done = bytearray()
        self.completed = self._recover(folder / OUTPUT)
        self.failed = self._recover(folder / ERRORS)
        self._output, self._errors = (folder / OUTPUT).open("ab"), (folder / ERRORS).open("ab")

    def _recover(self, path: Path) -> int:
        path.touch()
        size = lines = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    number = int(_decode_id(line).id.rpartition("_")[2])
                except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
                    break
                if not line.endswith(b"\n"):
                    break
                size += len(line)
                lines += 1
                self._done.extend(bytes(max(0, number + 1 - len(self._done))))
                self._done[number] = 1
        os.truncate(path, size)
        return lines

    def is_done(self, number: int) -> bool:
        """Return whether the request had a line when the files were opened."""
        return number < len(self._done) and bool(self._done[number])

    def add_reply(self, number: int, custom_id: str, request_id: str, reply: RowReply) -> None:
        response = _Response(reply.status, request_id, msgspec.Raw(reply.body))
        line = _ResultLine(f"{self._prefix}_{number}", custom_id, response)
        if reply.status == 200:
            self._write(self._output, line)
            self.completed += 1
        else:
            self._write(self._errors, line)
            self.failed += 1

    def add_stopped(self, number: int, custom_id: str, code: StopCode) -> None:
        error = _NotSent(code, _STOPPED[code])
        self._write(self._errors, _ResultLine(f"{self._prefix}_{number}", custom_id, None, error))
        self.failed += 1

    def _write(self, file: BinaryIO, line: _ResultLine) -> None:
        file.write(_encode(line) + b"\n")
        file.flush()

    def sync(self) -> None:
        sync(self._output)
        sync(self._errors)

    def close(self) -> None:
        for file in (self._output, self._errors):
            with contextlib.suppress(OSError):  # of a full disk: reported when it was written
                file.close()


class BatchExecution:
    """One run of a batch whose input has been checked. Belongs to one event loop.

    folder: of the results. slots: limits requests under way, of all batches.
    """

    def __init__(
        self, record: BatchRecord, input_path: Path, folder: Path, slots: asyncio.Semaphore
    ) -> None:
        self.folder = folder
        self._record, self._input = record, input_path
        self._slots = slots
        self._own_slots = asyncio.Semaphore(rows_in_flight(record.batch.request_counts.total))
        self._results: ResultFiles | None = None
        self.stop_code: StopCode | None = None
        self._rows: dict[asyncio.Task[None], tuple[int, str]] = {}
        self._stopped: list[tuple[int, str]] = []

    @property
    def counts(self) -> RequestCounts:
        total, results = self._record.batch.request_counts.total, self._results
        if results is None:
            return self._record.batch.request_counts
        return RequestCounts(total=total, completed=results.completed, failed=results.failed)

    def stop(self, code: StopCode) -> None:
        """End the batch: every request without an answer gets an error line."""
        self.stop_code = self.stop_code or code
        for row in self._rows:
            row.cancel()

    async def run(self, connect: Callable[[], Awaitable[RowClient]]) -> None:
        """Answer all requests. Raises OSError if a file cannot be read or written.

        connect: awaited if there are requests to send.
        """
        prefix = f"batch_req_{self._record.batch.id.removeprefix('batch_')}"
        results = await asyncio.to_thread(ResultFiles, self.folder, prefix)
        self._results = results
        lines = ((at, text) for at, text in read_requests(self._input) if not results.is_done(at))
        syncing = asyncio.create_task(_sync_regularly(results))
        try:
            async with asyncio.TaskGroup() as group:
                while block := await asyncio.to_thread(lambda: [*islice(lines, LINES_AT_ONCE)]):
                    for number, text in block:
                        await self._start(group, connect, number, text or b"")
            while self._stopped:
                self._add_stopped(*self._stopped.pop())
            await asyncio.to_thread(results.sync)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        finally:
            syncing.cancel()
            await asyncio.gather(syncing, return_exceptions=True)
            results.close()

    async def _start(
        self,
        group: asyncio.TaskGroup,
        connect: Callable[[], Awaitable[RowClient]],
        number: int,
        text: bytes,
    ) -> None:
        line = _decode_line(text)
        if self.stop_code is None:
            client = await connect()
            await self._own_slots.acquire()
            await self._slots.acquire()
            if self.stop_code is None:
                row = group.create_task(self._row(client, number, line))
                self._rows[row] = number, line.custom_id
                row.add_done_callback(self._end_row)
                return
            self._release()
        self._add_stopped(number, line.custom_id)

    def _end_row(self, row: asyncio.Task[None]) -> None:
        place = self._rows.pop(row)
        self._release()
        if row.cancelled() and self.stop_code is not None:  # perhaps before its first step
            self._stopped.append(place)

    def _release(self) -> None:
        self._slots.release()
        self._own_slots.release()

    async def _row(self, client: RowClient, number: int, line: RequestLine) -> None:
        batch = self._record.batch
        request_id = f"{batch.id}-{number}"
        caller = Caller(tenant=self._record.tenant, salt=self._record.salt, name=request_id)
        body, trace = bytes(line.body), self._record.trace
        reply = await client.answer(batch.endpoint, body, caller, trace=trace)
        assert self._results is not None
        self._results.add_reply(number, line.custom_id, request_id, reply)

    def _add_stopped(self, number: int, custom_id: str) -> None:
        assert self._results is not None
        assert self.stop_code is not None
        self._results.add_stopped(number, custom_id, self.stop_code)


async def _sync_regularly(results: ResultFiles) -> None:
    while True:
        await asyncio.sleep(SYNC_EVERY_S)
        await asyncio.to_thread(results.sync)
