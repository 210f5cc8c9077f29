"""Options of a bulk job, and the fingerprint of those that determine its answers."""

import argparse
import csv
import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from cluster.classification.classify import (
    DEFAULT_TEMPLATE,
    ClassifyTask,
    applicable_labels,
    check_questions,
    check_task,
    fill_template,
    render_prompt,
)
from cluster.tools.bulk.records import Fields, GeneratedRow, InputRow, RowAnswer, WindowLimits
from cluster.tools.bulk.sources import Source
from contracts.errors import ConfigError
from contracts.json_input import read_json_file
from contracts.requests import Priority

IN_FLIGHT_ROWS = 512
CHUNK_ROWS = 64
CHUNK_REQUESTS = 8
MAX_TOKENS = 256  # of an answer, by default
PROB_DIGITS = 7  # logits of two runs differ by up to 1e-5
_HEAD_BYTES = 64 << 10
_JOB_COPY = "working_dir_files"  # in the path of a Ray job's copy of its working directory


class RequestTask(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a job's rows.

    template: of the prompt to generate from. fields: added to each body. is_json: the answer must
    be complete JSON.
    """

    kind: Literal["generate", "score"]
    template: str = "{text}"
    fields: dict[str, Any] = {}
    is_json: bool = False

    def prompt(self, prefix: str, text: str) -> str:
        return fill_template(self.template, {"prefix": prefix, "text": text})


class BulkJob(msgspec.Struct, frozen=True, kw_only=True):
    """requests: of a job that generates or scores; None: it classifies.

    in_flight_rows: limit of unanswered rows, which the loss of a process repeats; None:
    `IN_FLIGHT_ROWS`, or more with many workers. unavailable_s: limit without any answer.
    """

    inputs: tuple[str, ...]
    output: Path
    labels: tuple[str, ...] = ()
    requests: RequestTask | None = None
    fields: Fields = Fields()
    template: str = DEFAULT_TEMPLATE
    multi_label: bool = False
    limit: int | None = None
    windows: WindowLimits = WindowLimits()
    in_flight_rows: int | None = None
    unavailable_s: float = 120.0
    resume: bool = False

    def task(self, max_context_tokens: int = 1 << 30) -> ClassifyTask:
        """Return the task that all rows share; each row has its own prefix."""
        return ClassifyTask(
            labels=self.labels,
            template=self.template,
            priority=Priority.BE,
            max_context_tokens=max_context_tokens,
        )

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, which is answered when its slowest row is."""
        most = CHUNK_ROWS if self.requests is None else CHUNK_REQUESTS
        return max(1, min(most, self.most_in_flight // 2))

    @property
    def most_in_flight(self) -> int:
        return self.in_flight_rows or IN_FLIGHT_ROWS

    def prompt(self, row: InputRow) -> str:
        """Return the row's prompt, or what of it determines common prefixes."""
        if self.requests is not None:
            return self.requests.prompt(row.prefix, row.text)
        return render_prompt(msgspec.structs.replace(self.task(), prefix=row.prefix), row.text)

    def line(self, row: InputRow, answer: RowAnswer | GeneratedRow) -> dict[str, Any]:
        """Return the row's line of the part file."""
        if isinstance(answer, GeneratedRow):
            is_json = self.requests is not None and self.requests.is_json
            text = {"json": msgspec.Raw(answer.text.encode())} if is_json else {"text": answer.text}
            return {
                "id": row.id,
                **text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
            }
        probs = [float(f"{prob:.{PROB_DIGITS}g}") for prob in answer.probs]
        tokens = {"prompt_tokens": answer.prompt_tokens}
        if self.requests is not None:
            return {"id": row.id, "scores": probs, **tokens}
        if self.multi_label:
            label: Any = applicable_labels(self.labels, answer.probs)
        else:
            label = self.labels[max(range(len(probs)), key=answer.probs.__getitem__)]
        return {"id": row.id, "label": label, "probs": probs, **tokens}


def check_job(job: BulkJob, here: Path) -> None:
    """Check what no input can correct.

    here: the folder of relative paths. Raises RequestError or ConfigError.
    """
    for text in (*job.labels, job.template):
        if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError("--labels and --template must be valid Unicode")
    if job.requests is None:
        check_task(job.task())
    if job.multi_label:
        check_questions(job.task())
    if _JOB_COPY in here.parts and not job.output.is_absolute():
        raise ConfigError(
            f"--output {job.output}: within a Ray job a relative folder would be in the job's copy "
            "of the working directory, which is deleted; give an absolute one"
        )


def fingerprint(job: BulkJob, sources: list[Source], model_folder: Path) -> dict[str, Any]:
    """Return all that determines the answers and their order, for job.json."""
    return {
        **({"requests": job.requests} if job.requests is not None else {}),
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
    """Hash names, sizes and the first 64 KiB of the model's files, independent of the folder."""
    digest = hashlib.blake2b(digest_size=16)
    names = ("*.json", "*.safetensors")
    for path in sorted({path for name in names for path in folder.glob(name)}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()


EXAMPLE = """examples:
  python -m tandem bulk --input reviews.jsonl --output out --labels negative,positive \\
    --template 'Review: {text}\\nSentiment:' --model bundled
  python -m tandem bulk --task generate --input tickets.csv --output out --model bundled \\
    --template 'Summarize: {text}' --max-tokens 64 --schema summary.schema.json
  ray job submit --working-dir . -- python -m tandem bulk --address auto \\
    --input 's3://bucket/rows-*.parquet' --output /shared/out --labels no,yes --id-field id --resume
input: .jsonl .ndjson .json (one object a line), .csv, .parquet; text also .gz .bz2 .zst; globs,
  folders, s3:// gs:// hdfs:// paths
output: part-*.jsonl (id; label and probs, or text, or json with --schema, or scores; in the order
  of the input), rejected.jsonl (id, place, reason), summary.json; --resume continues an earlier
  run, or starts a new one
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare all options except those of the model's configuration."""
    add = parser.add_argument
    add("--input", nargs="+", action="extend", required=True, metavar="PATH", help="files to read")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the answers")
    add(
        "--task",
        choices=("classify", "generate", "score"),
        default="classify",
        help="default %(default)s",
    )
    add("--labels", metavar="A,B,C", help="""classify: classes; 'a,"b, c"' are two""")
    add("--text-field", default="text", metavar="F", help='default "text"')
    add("--prefix-field", metavar="F", help='shared beginning (default "prefix", if present)')
    add("--id-field", metavar="F", help="default: the id is FILE:ROW")
    add("--template", metavar="T", help=f'default "{DEFAULT_TEMPLATE}"; \\n is a new line')
    add("--multi-label", action="store_true", help="any number of labels; {label} in --template")
    add(
        "--max-tokens", type=int, metavar="N", help=f"generate: of an answer (default {MAX_TOKENS})"
    )
    add("--schema", type=Path, metavar="F", help="generate: JSON of this JSON schema")
    add("--label-token-ids", metavar="1,2", help="score: tokens that may follow prefix and text")
    add(
        "--body",
        action="append",
        default=[],
        metavar="a=b",
        help="generate, score: a field of every request, such as temperature=0; repeatable",
    )
    add("--limit", type=int, metavar="N", help="only the first N rows")
    add("--resume", action="store_true", help="continue an earlier run")
    add("--address", metavar="ADDRESS", help="use the server running on this Ray cluster (or auto)")
    add(
        "--window-rows",
        type=int,
        default=WindowLimits().rows,
        metavar="N",
        help="rows that are sorted together",
    )
    add(
        "--in-flight",
        type=int,
        metavar="N",
        help="limit of unanswered rows, which a lost router repeats",
    )
    add("--patience", type=float, default=120.0, metavar="S", help="seconds without any answer")
    add("--json", action="store_true", help="print the summary as JSON")


def parse_job(options: argparse.Namespace) -> BulkJob:
    """Build the job from options. Raises ConfigError for numbers out of range."""
    for name in ("limit", "window_rows", "in_flight", "patience", "max_tokens"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}={value:g}: must be more than 0")
    template = DEFAULT_TEMPLATE if options.template is None else _unescaped(options.template)
    if options.prefix_field is not None and "{prefix}" not in template:
        raise ConfigError("--prefix-field: {prefix} does not occur in --template")
    is_score = options.task == "score"
    uses_prefix = "{prefix}" in template or is_score
    return BulkJob(
        inputs=tuple(options.input),
        output=options.output,
        labels=_labels(options.labels) if options.task == "classify" else (),
        requests=_requests(options, template),
        fields=Fields(
            text=options.text_field,
            prefix=(options.prefix_field or "prefix") if uses_prefix else None,
            id=options.id_field,
        ),
        template=template,
        multi_label=options.multi_label,
        limit=options.limit,
        windows=WindowLimits(rows=options.window_rows),
        in_flight_rows=options.in_flight,
        unavailable_s=options.patience,
        resume=options.resume,
    )


def _requests(options: argparse.Namespace, template: str) -> RequestTask | None:
    """Build the requests of a job that does not classify. Raises ConfigError."""
    uses = {
        "classify": {"labels", "multi_label", "template"},
        "generate": {"template", "max_tokens", "schema", "body"},
        "score": {"label_token_ids", "body"},
    }
    for other in set().union(*uses.values()) - uses[options.task]:
        if getattr(options, other):
            name = f"--{other.replace('_', '-')}"
            raise ConfigError(f"{name}: has no effect with --task {options.task}: leave it out")
    if options.task == "classify":
        return None
    fields = parse_fields("--body", options.body)
    if options.task == "score":
        given = (options.label_token_ids or "").split(",")
        if not all(part.strip().isdigit() for part in given):
            raise ConfigError("--label-token-ids: give token ids, such as 1,2")
        return RequestTask(kind="score", fields={"label_token_ids": [*map(int, given)], **fields})
    if "{text}" not in template:
        raise ConfigError("--template: {text} does not occur in it")
    fields = {"max_tokens": options.max_tokens or MAX_TOKENS, **fields}
    if options.schema is not None:
        schema = {"name": "row", "strict": True, "schema": _schema(options.schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    is_json = options.schema is not None
    return RequestTask(kind="generate", template=template, fields=fields, is_json=is_json)


def _schema(path: Path) -> dict[str, Any]:
    try:
        return read_json_file(path)
    except ConfigError as error:
        raise ConfigError(f"--schema {error.message}") from None


def parse_fields(option: str, given: list[str]) -> dict[str, Any]:
    """Parse FIELD=VALUE; each value is JSON, or else a string. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise ConfigError(f"{option} {each}: give FIELD=VALUE, such as ignore_eos=true")
        try:
            fields[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            fields[name] = value
    return fields


def _labels(given: str | None) -> tuple[str, ...]:
    """Parse labels as a line of CSV: a label with a comma is in double quotes."""
    if given is None:
        raise ConfigError("--labels: missing: give the classes, or --task generate or score")
    try:
        (line,) = csv.reader([given], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as error:
        raise ConfigError(
            f"--labels {given}: {error or 'none given'}; write them as a line of CSV, "
            "one with a comma in it in double quotes"
        ) from None
    return tuple(label.strip() for label in line)


def _unescaped(template: str) -> str:
    """Replace \\n and \\t, which a shell passes unchanged."""
    return template.replace("\\n", "\n").replace("\\t", "\t")
