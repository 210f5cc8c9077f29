"""How often guesses of experts are right on texts that the profile has not seen, by kind of guess,
layer and rank.

    python -m benchmarks.foretelling                                            (half a minute)
    python -m benchmarks.foretelling --input imdb.jsonl gsm8k_test.jsonl --field text question

Of the bundled model with its own profile. Texts: the project's own documents, unless rows of JSON
are given; --field: the first of these that a row has.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.offloaded_decode import Model, texts
from models.experts.expert_store import ResidentStore
from models.foresight.routing_collection import Collection

ROW_TOKENS = 256


def sources(options: argparse.Namespace, model: Model) -> Iterator[tuple[str, list[list[int]]]]:
    if not options.input:
        yield "documents", texts(model.tokenizer, options.rows, ROW_TOKENS)
    for path in options.input or ():
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            found = [json.loads(line) for _, line in zip(range(options.rows), file, strict=False)]
        rows = [model.tokenizer.encode(_text(row, options.field))[:ROW_TOKENS] for row in found]
        yield path.name.partition(".")[0], rows


def add_rows(parser: argparse.ArgumentParser, rows: int) -> None:
    """What `sources` asks for, and where the result goes."""
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--input", type=Path, nargs="*", help="files of rows (.jsonl, .jsonl.gz)")
    parser.add_argument("--field", nargs="+", default=["text"], help="the first that a row has")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")


def _text(row: dict[str, Any], fields: Sequence[str]) -> str:
    return next(str(row[field]) for field in fields if field in row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rows(parser, 200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, samples, summary = Model(), dict[str, Any](), dict[str, Any]()
    with torch.inference_mode():
        for name, rows in sources(options, model):
            collection = Collection(model.half, ResidentStore(model.experts), rows)
            found = collection.precision(model.profile, rows)
            samples[name] = {kind: each.tolist() for kind, each in found.items()}
            for kind, each in found.items():
                layers = each[:1] if kind == "token" else each[1:]
                summary[f"{name} | {kind}"] = {
                    "mean": round(float(layers.mean()), 3),
                    "layers": [round(float(layer.mean()), 2) for layer in layers],
                    "first guess": [round(float(layer[0]), 2) for layer in layers],
                }
    for name, row in summary.items():
        print(f"{name:32} {row}")
    options.input = [path.name for path in options.input or ()]
    record("foretelling", options, samples, summary)


if __name__ == "__main__":
    main()
