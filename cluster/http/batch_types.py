"""Files and batches as OpenAI's API has them, and calls of the service that keeps them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
BatchEndpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/classify", "/v1/score"]


class FileOwner(NamedTuple):
    """Digests of an API key, which name and separate its files, batches and cached prefixes."""

    tenant: bytes = b""
    salt: bytes = b""


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, or the results of a batch. Times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of a failed batch. line: of the input file, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The first errors of an input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch. failed: in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lifetime of a file. seconds: since its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/batches. completion_window: a number of m(inutes), h(ours) or d(ays)."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}[mhd]$")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    model: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: Metadata | None = None


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page, frozen=True, kw_only=True):
    """One page of files, the latest first unless order=asc."""

    data: list[FileObject]


class BatchList(_Page, frozen=True, kw_only=True):
    """One page of batches, the latest first."""

    data: list[BatchObject]


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that has been deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of a list. after: the last id of the page before. purpose, order: of files."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


BatchCall = Callable[..., Awaitable[Any]]
"""Name of a method of `cluster.batch.service.Batches`, and its arguments → its result. Objects of
other owners do not exist for a caller. Raises RequestError, or NotReadyError while the service
cannot be reached."""
