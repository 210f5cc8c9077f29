"""`/v1/files` and `/v1/batches`: checks, uploads in pieces, and calls of the batch service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cluster.http.admin import PlainEndpoint
from cluster.http.batch_types import BatchBody, ExpiresAfter, FileObject, FileOwner, PageQuery
from cluster.http.body import read_small_body
from cluster.http.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from cluster.http.request_context import MAX_UPLOADS, AppState
from cluster.http.responses import json_response
from cluster.http.spans import trace_headers
from contracts.errors import ClientGoneError, NotReadyError, OverloadError, RequestError
from contracts.json_input import wrong_field

MAX_BODY_BYTES = 1 << 16  # of /v1/batches
MAX_FIELD_BYTES = 1 << 10  # of a form's field
MAX_FIELDS = 16
MAX_FILENAME_CHARACTERS = 255
PIECE_BYTES = 1 << 20
MIN_BYTES_PER_S = 16 << 10  # an upload slower than this ends after http.body_timeout_s
REPLY_TIMEOUT_S = 60.0
_UNTITLED = "file.jsonl"


class UploadForm:
    """Streaming parser of a multipart form with one file. Its short fields are kept.

    Raises MediaTypeError unless the body is a form.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise MediaTypeError("content-type: expected multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._pieces: list[bytes] = []
        self._name, self._is_file = "", False
        self._header, self._header_value = bytearray(), bytearray()
        self._value = bytearray()
        self._is_complete = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, a, b: self._header.extend(data[a:b]),
                "on_header_value": lambda data, a, b: self._header_value.extend(data[a:b]),
                "on_header_end": self._end_header,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces of the file in `data`. Raises RequestError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(f"the form is malformed: {error}") from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def check(self) -> None:
        """Check the complete form. Raises RequestError."""
        if not self._is_complete:
            raise RequestError("the form ends before its last boundary")
        if self.filename is None:
            raise RequestError("file: missing: give the file as a part of the form", "file")
        purpose = self.fields.get("purpose")
        if purpose != "batch":
            given = "missing" if purpose is None else f"{purpose[:64]!r} is not supported"
            raise RequestError(f"purpose: {given}: use batch", "purpose")

    def expires_after_s(self) -> int | None:
        """Return the requested lifetime. Raises RequestError."""
        given = {
            name: value
            for name in ("anchor", "seconds")
            if (value := self.fields.get(f"expires_after[{name}]")) is not None
        }
        if not given:
            return None
        try:
            return msgspec.convert(given, ExpiresAfter, strict=False).seconds
        except msgspec.ValidationError as error:
            field, text = wrong_field(str(error))
            raise RequestError(f"expires_after[{field}]: {text}", "expires_after") from None

    def _begin_part(self) -> None:
        self._name, self._is_file = "", False
        self._value.clear()

    def _end_header(self) -> None:
        name = bytes(self._header).lower()
        value = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()
        if name != b"content-disposition":
            return
        options = parse_options_header(value)[1]
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise RequestError("file: given twice: upload one file at a time", "file")
            self._is_file = True
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = given[-MAX_FILENAME_CHARACTERS:] or _UNTITLED

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        if len(self._value) + end - start > MAX_FIELD_BYTES:
            raise RequestError(f"{self._name[:64]}: longer than {MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= MAX_FIELDS:
            raise RequestError(f"the form has more than {MAX_FIELDS} fields")
        self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


async def upload_file(app_state: AppState, request: Request) -> Response:
    owner = _owner(app_state, request)
    app_state.drainer.check()
    form = UploadForm(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        _check_size(app_state, int(declared) - MAX_FIELDS * MAX_FIELD_BYTES)
    if app_state.uploads.locked():
        raise OverloadError(f"{MAX_UPLOADS} files are being uploaded: try again in 5 s", 5.0)
    async with app_state.uploads:
        upload = await _call(app_state, "begin_upload", owner)
        try:
            await _receive(app_state, request, form, upload)
            form.check()
            file = form.filename or _UNTITLED, form.expires_after_s()
            return json_response(await _call(app_state, "end_upload", upload, *file))
        except BaseException:
            await asyncio.shield(_call(app_state, "abort_upload", upload))
            raise


async def _receive(app_state: AppState, request: Request, form: UploadForm, upload: str) -> None:
    """Write the file of the form in pieces of about PIECE_BYTES."""
    loop, limit_s = asyncio.get_running_loop(), app_state.http.body_timeout_s
    started_s, received, size = loop.time(), 0, 0
    buffer = bytearray()
    try:
        async with asyncio.timeout(limit_s) as deadline:
            async for chunk in request.stream():
                received += len(chunk)
                deadline.reschedule(started_s + limit_s + received / MIN_BYTES_PER_S)
                for piece in form.feed(chunk):
                    size += len(piece)
                    buffer += piece
                _check_size(app_state, size)
                if len(buffer) >= PIECE_BYTES:
                    await _call(app_state, "write_upload", upload, bytes(buffer))
                    buffer.clear()
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body stopped arriving for {limit_s:g} s (http.body_timeout_s)"
        ) from None
    except ClientDisconnect:
        raise ClientGoneError("the client disconnected while sending its file") from None
    if buffer:
        await _call(app_state, "write_upload", upload, bytes(buffer))


def _check_size(app_state: AppState, size: int) -> None:
    most = app_state.config.batch.file_bytes
    if size > most:
        raise BodyTooLargeError(
            f"file: larger than {most} bytes (batch.file_bytes): upload it in parts", "file"
        )


async def file_content(app_state: AppState, request: Request) -> Response:
    """Answer `GET /v1/files/{id}/content` in pieces, each read when the one before is sent."""
    owner = _owner(app_state, request)
    file: FileObject = await _call(app_state, "get_file", owner, request.path_params["id"])
    # Before the answer begins: its errors have a status.
    first: bytes = await _call(app_state, "read_file", owner, file.id, 0)

    async def pieces() -> AsyncIterator[bytes]:
        piece, offset = first, 0
        while piece:  # none if deleted meanwhile: the connection closes before the declared end
            yield piece
            offset += len(piece)
            if offset >= file.bytes:
                return
            piece = await _call(app_state, "read_file", owner, file.id, offset)

    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    return StreamingResponse(pieces(), headers=headers, media_type="application/octet-stream")


async def create_batch(app_state: AppState, request: Request) -> Response:
    owner = _owner(app_state, request)
    app_state.drainer.check()
    body = await read_small_body(app_state, request, BatchBody, MAX_BODY_BYTES)
    trace = () if app_state.tracer is None else trace_headers(request.scope["headers"])
    return json_response(await _call(app_state, "create_batch", owner, body, trace))


def page_query(request: Request) -> PageQuery:
    try:
        return msgspec.convert(dict(request.query_params), PageQuery, strict=False)
    except msgspec.ValidationError as error:
        field, text = wrong_field(str(error))
        raise RequestError(f"{field}: {text}", field) from None


def on_owned(
    method: str, argument: Callable[[Request], object] = lambda request: request.path_params["id"]
) -> PlainEndpoint:
    """Return the endpoint that calls a method with the caller and an argument of the request."""

    async def endpoint(app_state: AppState, request: Request) -> Response:
        owner = _owner(app_state, request)
        return json_response(await _call(app_state, method, owner, argument(request)))

    return endpoint


def _owner(app_state: AppState, request: Request) -> FileOwner:
    authenticator = app_state.authenticator
    caller = authenticator.caller(authenticator.check(request))
    return FileOwner(caller.tenant, caller.salt)


async def _call(app_state: AppState, method: str, *arguments: object) -> Any:
    if app_state.batches is None:
        raise NotReadyError("this server keeps no files and batches")
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            return await app_state.batches(method, *arguments)
    except TimeoutError:
        raise NotReadyError(
            f"the batch service has not answered within {REPLY_TIMEOUT_S:g} s"
        ) from None
