"""Section `batch`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Count, OutputFolder, Section


class BatchConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches: `/v1/files`, `/v1/batches`. They are run on the head node."""

    storage: OutputFolder | None = None
    """Folder, or URL of any fsspec filesystem whose package is installed (s3://BUCKET/FOLDER, with
    s3fs), of files and batches. They outlive the server. null: $XDG_STATE_HOME/tandem/NAME."""
    file_bytes: Count = 512 << 20
    """Maximum bytes of an uploaded file."""
    requests: Count = 1_000_000
    """Maximum requests of a batch."""
    key_bytes: Count = 16 << 30
    """Maximum bytes of all files of an API key."""
    key_batches: Count = 32
    """Maximum unfinished batches of an API key."""
    in_flight_rows: Count = 256
    """Requests of all batches that are sent at a time; of one batch at most 32, or 1/4000 of its
    requests if that is more. A lost process repeats at most these."""
    keep_days: Annotated[float, Meta(gt=0)] = 30.0
    """Days after which files, and batches that have ended, are deleted."""
