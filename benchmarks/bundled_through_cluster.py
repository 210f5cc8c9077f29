"""The test splits through the whole cluster over HTTP, beside `transformers`, row by row.

    python -m benchmarks.bundled_through_cluster --data DATA

Both compute in float32. Reported per task: accuracy on either side, rows whose answer differs, and
the largest difference of any label's probability.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness import Result, write_result
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from cluster.serving.server import serving
from contracts.config import BUNDLED
from contracts.loading import load_config
from training.bundled.evaluate import Evaluator, Question, load, questions
from training.bundled.tasks import TASKS, LabelTask, read_rows

ROWS_PER_REQUEST = 64
REQUESTS_AT_ONCE = 4


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Fractions are 0..1."""

    task: str
    rows: int
    cluster_accuracy: float
    transformers_accuracy: float
    rows_that_differ: int
    max_probability_difference: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    settings = [
        "groups.attention_ranks=2",
        "groups.expert_ranks=2",
        "model.dtype=float32",
        "schedule.r2=2",
        f"http.port={free_port()}",
    ]
    with serving(load_config(None, settings)) as served:
        by_task = {task.name: _ask(served.url, task, options.data) for task in track(TASKS)}
    torch.set_num_threads(2)
    evaluator = Evaluator(*load(resolve_model_folder(BUNDLED), torch.float32))
    rows = [_compare(evaluator, task, by_task[task.name], options.data) for task in track(TASKS)]
    _show(rows)
    result = Result(
        name="bundled_through_cluster",
        kind="measured",
        settings={"config": settings[:-1]},
        samples={row.task: msgspec.to_builtins(row) for row in rows},
        summary={"rows_that_differ": sum(row.rows_that_differ for row in rows)},
    )
    print(f"written: {write_result(result, options.output)}")


def _ask(url: str, task: LabelTask, data: Path) -> list[list[float]]:
    """The probabilities of every label, row by row, through POST /v1/classify."""
    asked = list(questions(task, data))
    pieces = [asked[at : at + ROWS_PER_REQUEST] for at in range(0, len(asked), ROWS_PER_REQUEST)]
    with httpx.Client(base_url=url, timeout=120.0) as client:

        def classify(piece: Sequence[Question]) -> list[list[float]]:
            body = {
                "model": BUNDLED,
                "input": [question.prompt for question in piece],
                "labels": list(task.labels),
            }
            answer = client.post("/v1/classify", json=body).raise_for_status().json()
            return [item["probs"] for item in answer["data"]]

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            return [probs for piece in threads.map(classify, pieces) for probs in piece]


def _compare(
    evaluator: Evaluator, task: LabelTask, cluster: list[list[float]], data: Path
) -> Compared:
    rows = read_rows(task, data, "test")
    scores, _ = evaluator.score(task, rows)
    theirs, ours = scores.softmax(-1), torch.tensor(cluster)
    gold = torch.tensor([row.label for row in rows])
    return Compared(
        task=task.name,
        rows=len(rows),
        cluster_accuracy=float((ours.argmax(-1) == gold).float().mean()),
        transformers_accuracy=float((theirs.argmax(-1) == gold).float().mean()),
        rows_that_differ=int((ours.argmax(-1) != theirs.argmax(-1)).sum()),
        max_probability_difference=float((ours - theirs).abs().max()),
    )


def _show(rows: Sequence[Compared]) -> None:
    table = Table()
    for heading in ("task", "rows", "cluster", "transformers", "rows that differ", "max |Δp|"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for row in rows:
        table.add_row(
            row.task,
            str(row.rows),
            f"{row.cluster_accuracy:.4f}",
            f"{row.transformers_accuracy:.4f}",
            str(row.rows_that_differ),
            f"{row.max_probability_difference:.1e}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
