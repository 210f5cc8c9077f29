"""What a bulk job is asked to do, and what of it decides the answers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from cluster.bulk.rows import Fields
from cluster.bulk.sources import Source
from cluster.bulk.windows import WindowLimits
from cluster.classification.classify import DEFAULT_TEMPLATE, ClassifyTask, check_task
from cluster.classification.multilabel import check_questions
from contracts.errors import ConfigError
from contracts.requests import Priority

_HEAD_BYTES = 64 << 10
_JOB_COPY = "working_dir_files"  # in the path of a Ray job's copy of its working directory


class BulkJob(msgspec.Struct, frozen=True, kw_only=True):
    """in_flight_rows: sent to the router and not yet answered, so the most that its death or the
    driver's can cost; None: `IN_FLIGHT_ROWS`, or more with many workers."""

    inputs: tuple[str, ...]
    output: Path
    labels: tuple[str, ...]
    fields: Fields = Fields()
    template: str = DEFAULT_TEMPLATE
    multi_label: bool = False
    limit: int | None = None
    windows: WindowLimits = WindowLimits()
    in_flight_rows: int | None = None
    unavailable_s: float = 120.0
    resume: bool = False

    def task(self, max_context_tokens: int = 1 << 30) -> ClassifyTask:
        """What all rows share; each has its own prefix."""
        return ClassifyTask(
            labels=self.labels,
            template=self.template,
            priority=Priority.BE,
            max_context_tokens=max_context_tokens,
        )


def check_job(job: BulkJob, here: Path) -> None:
    """Raises RequestError or ConfigError for what no input can make right. here: the folder that
    relative paths start from."""
    for text in (*job.labels, job.template):
        if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError("--labels and --template must be valid Unicode")
    check_task(job.task())
    if job.multi_label:
        check_questions(job.task())
    if _JOB_COPY in here.parts and not job.output.is_absolute():
        raise ConfigError(
            f"--output {job.output}: within a Ray job a relative folder would be in the job's copy "
            "of the working directory, which is deleted; give an absolute one"
        )


def fingerprint(job: BulkJob, sources: list[Source], model_folder: Path) -> dict[str, Any]:
    """All that decides the answers and their order, for job.json."""
    return {
        "inputs": [source.file for source in sources],
        "labels": job.labels,
        "template": job.template,
        "text_field": job.fields.text,
        "prefix_field": job.fields.prefix,
        "id_field": job.fields.id,
        "multi_label": job.multi_label,
        "limit": job.limit,
        "window": job.windows,
        "model": model_digest(model_folder),
    }


def model_digest(folder: Path) -> str:
    """Of the files' names and sizes and of the first 64 KiB of each: wherever the folder stands."""
    digest = hashlib.blake2b(digest_size=16)
    names = ("*.json", "*.safetensors")
    for path in sorted({path for name in names for path in folder.glob(name)}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()
