"""Accuracy of a checkpoint on the test splits, through `transformers`.

    python -m training.bundled.evaluate --data DATA --checkpoint models/bundled

`questions` yields the same rows as (prompt, labels, gold), for use over HTTP.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from training.bundled.tasks import TASKS, LabelTask, TaskRow, chance_of, prompt_of, read_rows
from training.bundled.tokenizer import label_ids

BATCH_ROWS = 64


class Question(NamedTuple):
    """One row as the server sees it: `labels` go right after `prompt`; `gold` indexes them."""

    prompt: str
    labels: tuple[str, ...]
    gold: int


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of one task. Fractions are 0..1; `expert_tokens` counts by layer and expert."""

    name: str
    test_rows: int
    chance: float
    accuracy: float
    expert_tokens: list[list[int]]


def questions(task: LabelTask, data: Path, split: str = "test") -> Iterator[Question]:
    """Yield the rows of one split in file order."""
    for row in read_rows(task, data, split):
        yield Question(prompt_of(task, row), task.labels, row.label)


def _batches(encoded: list[list[int]]) -> Iterator[list[int]]:
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    yield from (order[at : at + BATCH_ROWS] for at in range(0, len(order), BATCH_ROWS))


def _padded(encoded: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, S] padded on the right, outside of causal attention, and row lengths."""
    lengths = torch.tensor([len(ids) for ids in encoded])
    longest = int(lengths.max())
    return torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in encoded]), lengths


class Evaluator:
    """Scores label tokens with one `transformers` model."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer

    @torch.no_grad()
    def score(self, task: LabelTask, rows: Sequence[TaskRow]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [rows, labels], and routed tokens [layers, experts]."""
        encoded = [
            self._tokenizer.encode(prompt_of(task, row), add_special_tokens=False) for row in rows
        ]
        labels = label_ids(self._tokenizer, task)
        config = self._model.config
        scores = torch.empty(len(rows), len(labels))
        loads = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.long)
        for index in _batches(encoded):
            ids, lengths = _padded([encoded[i] for i in index], config.pad_token_id)
            output = self._model.model(input_ids=ids, output_router_logits=True)
            last = output.last_hidden_state[torch.arange(len(index)), lengths - 1]
            scores[index] = self._model.lm_head(last).float().log_softmax(-1)[:, labels]
            valid = (torch.arange(ids.shape[1])[None] < lengths[:, None]).flatten()
            for layer, router_logits in enumerate(output.router_logits):
                chosen = (
                    router_logits.flatten(0, -2)[valid].topk(config.num_experts_per_tok, -1).indices
                )
                loads[layer] += chosen.flatten().bincount(minlength=config.num_experts)
        return scores, loads

    def evaluate(self, task: LabelTask, rows: Sequence[TaskRow]) -> TaskResult:
        """Return the accuracy of one task on `rows`."""
        scores, loads = self.score(task, rows)
        gold = torch.tensor([row.label for row in rows])
        return TaskResult(
            name=task.name,
            test_rows=len(rows),
            chance=chance_of(list(rows)),
            accuracy=float((scores.argmax(-1) == gold).float().mean()),
            expert_tokens=loads.tolist(),
        )


def load(checkpoint: Path, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load model and tokenizer of a checkpoint folder."""
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=dtype)
    return model, AutoTokenizer.from_pretrained(str(checkpoint))


def evaluate_checkpoint(checkpoint: Path, data: Path, dtype: torch.dtype) -> list[TaskResult]:
    """Evaluate every task on its test split."""
    evaluator = Evaluator(*load(checkpoint, dtype))
    return [
        evaluator.evaluate(task, read_rows(task, data, "test"))
        for task in track(TASKS, "evaluating")
    ]


def layer_balance(results: Sequence[TaskResult]) -> list[float]:
    """Return, per layer, the load of the busiest expert over the mean load (1 = even)."""
    total = torch.tensor([result.expert_tokens for result in results]).sum(0).float()
    return [float(load.max() / load.mean()) for load in total]


def table(results: Sequence[TaskResult]) -> str:
    """Return a Markdown table of the results beside chance and the linear baseline."""
    lines = ["| task | test rows | chance | linear | accuracy |", "|---|---:|---:|---:|---:|"]
    linear = {task.name: task.linear_accuracy for task in TASKS}
    for r in results:
        numbers = f"{r.chance:.3f} | {linear[r.name]:.3f} | {r.accuracy:.3f}"
        lines.append(f"| {r.name} | {r.test_rows} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and optionally write the results as JSON."""
    parser = argparse.ArgumentParser(
        description="Accuracy of a checkpoint on the test splits.",
        epilog="example: python -m training.bundled.evaluate --data DATA",
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds classification/*.jsonl[.gz]"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("models/bundled"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = evaluate_checkpoint(args.checkpoint, args.data, getattr(torch, args.dtype))
    print(table(results))
    print(
        "max/mean expert load per layer:",
        ", ".join(f"{value:.2f}" for value in layer_balance(results)),
    )
    if args.json:
        args.json.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
