"""Golden files: the interface that clients, operators and dashboards depend on.

    python -m tests.architecture.golden_files    # rewrite them after an intended change

Each file in `tests/architecture/golden/` is generated from the code. A difference in a review is
a change of the public interface.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from cluster.cli.main import _parser
from cluster.http.openapi import openapi_document
from cluster.http.schemas import ModelInfo
from contracts import metrics
from contracts.config import HttpConfig

GOLDEN = Path(__file__).parent / "golden"


def golden_files() -> dict[str, str]:
    """File name → expected contents."""
    return {"openapi.json": _openapi(), "metrics.txt": _metrics(), "help.txt": _help()}


def _openapi() -> str:
    model = ModelInfo(name="m", max_context_tokens=256, vocab_size=420, eos_token_ids=())
    document: dict[str, Any] = openapi_document(model, HttpConfig())
    document["info"].pop("version", None)
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _metrics() -> str:
    rows = [
        f"{metric.kind.value:9} {metric.name}{{{','.join(metric.labels)}}}"
        for metric in metrics.ALL
    ]
    return "\n".join(sorted(rows)) + "\n"


def _help() -> str:
    os.environ["COLUMNS"] = "100"  # argparse wraps to the terminal's width
    parser = _parser()
    texts = [parser.format_help()]
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        assert isinstance(action, argparse._SubParsersAction)
        texts += [
            f"$ tandem {name} --help\n{command.format_help()}"
            for name, command in action.choices.items()
        ]
    return "\n\n".join(texts)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, text in golden_files().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
