"""Prefill-only answers beside greedy decoding on the same checkpoint and prompts, task by task
(MoE-Prefill, Tables 3 and 4), and beside `transformers`.

    python -m benchmarks.prefill_accuracy --data DATA

prefill-only: POST /v1/classify, the likeliest label by the logits of one pass. greedy: POST
/v1/completions, a few tokens, of which the label is read; what names no label is wrong.
transformers: the likeliest label by its logits, the same as prefill-only in every row, unless two
labels tie.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.asked_server import NEW_TOKENS, Answers, AskedServer, Question
from benchmarks.harness import record
from benchmarks.padded import PaddedModel, ScoredRow
from benchmarks.task_templates import TASKS, Posed, Row, prompt_of, read_rows
from cluster.classification.multilabel import ANSWERS, YES
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from cluster.serving.server import serving
from contracts.config import BUNDLED
from contracts.loading import load_config
from models.spec.model import read_spec

TIE = 1e-4  # of a probability
# Each way has a pipeline of its own, and so a prefix cache of its own.
RANKS = ("groups.attention_ranks=1", "groups.expert_ranks=1", "groups.prefill_ranks=2")


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Fractions are 0..1; rates count questions and prompt tokens per second."""

    task: str
    familiar: str
    questions: int
    labels: int
    left_out: int  # rows longer than the model's context
    chance: float
    greedy_accuracy: float
    prefill_accuracy: float
    unparsable: int
    agreement: float
    greedy_rows_per_s: float
    prefill_rows_per_s: float
    greedy_tokens_per_s: float
    prefill_tokens_per_s: float
    differ_from_transformers: int | None = None
    ties: int | None = None
    max_probability_difference: float | None = None


def questions_of(task: Posed, rows: Sequence[Row]) -> list[Question]:
    """What decoding is asked: a question per row, or per row and label."""
    if not task.asks_each:
        return [Question(prompt_of(task, row), row.labels, row.gold) for row in rows]
    return [
        Question(prompt_of(task, row, label), ANSWERS, YES if place == row.gold else 1 - YES)
        for row in rows
        for place, label in enumerate(row.labels)
    ]


class Oracle:
    """`transformers` with its own tokenizer."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = PaddedModel(folder, dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def probs(self, questions: Sequence[Question]) -> list[list[float]]:
        """The softmax over the labels' summed log-probabilities after the prompt."""
        asked, targets = [], []
        for prompt, labels, _ in questions:
            start = len(self._tokenizer.encode(prompt))
            for label in labels:
                whole = self._tokenizer.encode(f"{prompt} {label}")
                asked.append(ScoredRow(whole[:-1], range(start - 1, len(whole) - 1)))
                targets.append(torch.tensor(whole[start:]))
        totals = torch.empty(len(asked), dtype=torch.float64)
        for index, logits in self._model.logits(asked):
            chosen = logits.double().log_softmax(-1).gather(1, targets[index][:, None])
            totals[index] = chosen.sum()
        split = torch.split(totals, [len(question.labels) for question in questions])
        return [row.softmax(0).tolist() for row in split]


def compare(
    task: Posed,
    asked: Sequence[Question],
    left_out: int,
    greedy: Answers,
    prefill: Answers,
) -> Compared:
    gold = [question.gold for question in asked]
    count = len(gold)
    return Compared(
        task=task.name,
        familiar=task.familiar,
        questions=count,
        labels=len(asked[0].labels),
        left_out=left_out,
        chance=max(Counter(gold).values()) / count,
        greedy_accuracy=_equal(greedy.chosen, gold) / count,
        prefill_accuracy=_equal(prefill.chosen, gold) / count,
        unparsable=greedy.chosen.count(None),
        agreement=_equal(greedy.chosen, prefill.chosen) / count,
        greedy_rows_per_s=count / greedy.seconds,
        prefill_rows_per_s=count / prefill.seconds,
        greedy_tokens_per_s=greedy.prompt_tokens / greedy.seconds,
        prefill_tokens_per_s=prefill.prompt_tokens / prefill.seconds,
    )


def check(row: Compared, ours: list[list[float]], theirs: list[list[float]]) -> Compared:
    """With what `transformers` says: rows with another answer, and those of them that are ties."""
    differ = ties = 0
    largest = 0.0
    for our, their in zip(ours, theirs, strict=True):
        largest = max(largest, *(abs(a - b) for a, b in zip(our, their, strict=True)))
        best = our.index(max(our))
        if best != their.index(max(their)):
            differ += 1
            ties += max(their) - their[best] <= TIE
    return msgspec.structs.replace(
        row, differ_from_transformers=differ, ties=ties, max_probability_difference=largest
    )


def main() -> None:
    options = _options()
    folder = resolve_model_folder(options.model)
    context = read_spec(folder).max_context_tokens
    tokenizer = AutoTokenizer.from_pretrained(folder)
    work = []
    for task in (task for task in TASKS if task.name in options.tasks):
        rows = _available(task, options)
        short = [row for row in rows if _tokens(tokenizer, task, row) <= context]
        if short:
            work.append((task, short, len(rows) - len(short)))
        elif rows:
            print(f"{task.name}: left out, no row fits the context of {context} tokens")
    settings = [*RANKS, f"model.path={options.model}", f"model.dtype={options.dtype}", *options.set]
    answers = []
    with serving(load_config(None, [*settings, f"http.port={free_port()}"])) as served:
        server = AskedServer(served.url)
        for task, rows, left_out in work:
            asked = questions_of(task, rows)
            prefill, greedy = server.classify(task, rows), server.decode(asked)
            answers.append((compare(task, asked, left_out, greedy, prefill), asked, prefill))
            print(f"{task.name}: {answers[-1][0].prefill_accuracy:.3f}", flush=True)
    compared = _checked(folder, answers, options)
    _show(compared)
    samples = {row.task: msgspec.to_builtins(row) for row in compared}
    record("prefill_accuracy", options, samples, _summary(compared), {"folder": options.model})


def _available(task: Posed, options: argparse.Namespace) -> list[Row]:
    count = max(1, round(options.rows * task.share))
    try:
        return read_rows(task, options.data, count, options.seed)
    except FileNotFoundError:
        print(f"{task.name}: left out, there is no {task.file}")
        return []


def _tokens(tokenizer: Any, task: Posed, row: Row) -> int:
    longest = max(row.labels, key=len)
    return len(tokenizer.encode(f"{prompt_of(task, row, longest)} {longest}")) + NEW_TOKENS


def _checked(
    folder: Path, answers: list[tuple[Compared, list[Question], Answers]], options: Any
) -> list[Compared]:
    if not options.transformers:
        return [row for row, _, _ in answers]
    torch.set_num_threads(2)
    oracle = Oracle(folder, getattr(torch, options.dtype))
    return [check(row, prefill.probs or [], oracle.probs(asked)) for row, asked, prefill in answers]


def _summary(rows: Sequence[Compared]) -> dict[str, Any]:
    unexplained = [(row.differ_from_transformers or 0) - (row.ties or 0) for row in rows]
    gaps = [abs(row.prefill_accuracy - row.greedy_accuracy) for row in rows]
    return {
        "rows_that_differ_from_transformers": sum(unexplained),
        "largest_gap_to_greedy": max(gaps, default=math.nan),
    }


def _equal(left: Sequence[int | None], right: Sequence[int | None]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=True))


def _show(rows: Sequence[Compared]) -> None:
    table = Table(title="accuracy; rows/s; seen by the bundled model in training")
    headings = (
        *("task", "seen", "N", "K", "chance", "greedy", "prefill-only", "Δ pp", "unreadable"),
        *("agree", "rows/s", "prefill rows/s", "≠ transformers (ties)", "max |Δp|"),
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("task", "seen") else "right")
    for row in rows:
        differ, most = "–", "–"
        if row.differ_from_transformers is not None:
            differ = f"{row.differ_from_transformers} ({row.ties})"
            most = f"{row.max_probability_difference:.0e}"
        table.add_row(
            row.task, row.familiar, str(row.questions), str(row.labels), f"{row.chance:.3f}",
            f"{row.greedy_accuracy:.3f}", f"{row.prefill_accuracy:.3f}",
            f"{100 * (row.prefill_accuracy - row.greedy_accuracy):+.1f}", str(row.unparsable),
            f"{row.agreement:.3f}", f"{row.greedy_rows_per_s:.0f}",
            f"{row.prefill_rows_per_s:.0f}", differ, most,
        )  # fmt: skip
    Console(width=150).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/")
    parser.add_argument("--rows", type=int, default=200, help="of each task")
    names = [task.name for task in TASKS]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, metavar="TASK")
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
