"""The command line of `tandem bulk`. Imports neither Ray nor torch: --help need not wait."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from cluster.bulk.job import BulkJob
from cluster.bulk.rows import Fields
from cluster.bulk.windows import WindowLimits
from cluster.classification.classify import DEFAULT_TEMPLATE
from contracts.errors import ConfigError

EXAMPLE = """examples:
  python -m cluster.bulk --input reviews.jsonl --output out --labels negative,positive \\
    --template 'Review: {text}\\nSentiment:' --model bundled
  ray job submit --working-dir . -- python -m cluster.bulk --address auto \\
    --input 's3://bucket/rows-*.parquet' --output /shared/out --labels no,yes --id-field id --resume
input: .jsonl .ndjson .json (one object a line), .csv, .parquet; text also .gz .bz2 .zst; globs,
  folders, s3:// gs:// hdfs:// paths
output: part-*.jsonl (id, label, probs, in the order of the input), rejected.jsonl (id, place,
  reason), summary.json; --resume goes on from whatever is there, and starts where nothing is
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """All but those of the model's configuration."""
    add = parser.add_argument
    add("--input", nargs="+", action="extend", required=True, metavar="PATH", help="files to read")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the answers")
    add(
        "--labels", required=True, metavar="A,B,C", help="""what a row can be; 'a,"b, c"' are two"""
    )
    add("--text-field", default="text", metavar="F", help='default "text"')
    add("--prefix-field", metavar="F", help='what rows may share (default "prefix", where it is)')
    add("--id-field", metavar="F", help="default: rows are called FILE:ROW")
    add("--template", metavar="T", help=f'default "{DEFAULT_TEMPLATE}"; \\n is a new line')
    add("--multi-label", action="store_true", help="any number of labels; {label} in --template")
    add("--limit", type=int, metavar="N", help="only the first N rows")
    add("--resume", action="store_true", help="go on with what an earlier run left")
    add("--address", metavar="ADDRESS", help="use the server running on this Ray cluster (or auto)")
    add("--window-rows", type=int, default=WindowLimits().rows, metavar="N", help="sorted at once")
    add("--in-flight", type=int, metavar="N", help="rows under way, and lost with a router")
    add("--patience", type=float, default=120.0, metavar="S", help="seconds without any answer")
    add("--json", action="store_true", help="print the summary as JSON")


def job_of(options: argparse.Namespace) -> BulkJob:
    """Raises ConfigError for a number that cannot be."""
    for name in ("limit", "window_rows", "in_flight", "patience"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}={value:g}: must be more than 0")
    template = DEFAULT_TEMPLATE if options.template is None else _unescaped(options.template)
    if options.prefix_field is not None and "{prefix}" not in template:
        raise ConfigError("--prefix-field: {prefix} does not occur in --template")
    uses_prefix = "{prefix}" in template
    return BulkJob(
        inputs=tuple(options.input),
        output=options.output,
        labels=_labels(options.labels),
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


def _labels(given: str) -> tuple[str, ...]:
    """As a line of CSV: a label with a comma in it stands in double quotes."""
    try:
        (line,) = csv.reader([given], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as error:
        raise ConfigError(
            f"--labels {given}: {error or 'none given'}; write them as a line of CSV, "
            "one with a comma in it in double quotes"
        ) from None
    return tuple(label.strip() for label in line)


def _unescaped(template: str) -> str:
    """A shell passes \\n as it stands."""
    return template.replace("\\n", "\n").replace("\\t", "\t")
