"""Accuracies and log-likelihoods of lm-eval through `tandem serve` beside its hf backend.

Both compute in float32.

    python -m benchmarks lm_eval_check --data DATA
"""

import argparse
import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml

from benchmarks.harness import Measured, Table, documented_case
from benchmarks.support.server import ServerProcess
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from models.text.tokenizer import Tokenizer
from training.bundled.tasks import raw_rows

SETTINGS = ("--dtype", "float32", "--attention-ranks", "2", "--expert-ranks", "2")
MAX_PROMPT_TOKENS = 1900  # of the model's 2,048: neither backend may have to cut an item
TOLERANCE = 1e-4  # of a log-likelihood, which is a sum over tokens

# Ways in which lm-eval sends its requests.
WAYS: dict[str, dict[str, object]] = {
    "token ids, 8 at once": {"num_concurrent": 8},
    "texts, 16 a request": {"tokenized_requests": False, "batch_size": 16},
}


class Item(msgspec.Struct, frozen=True):
    """One multiple-choice question, as lm-eval reads it from a JSON line."""

    prompt: str
    choices: list[str]
    gold: int


class ScoredChoice(msgspec.Struct, frozen=True):
    """What a backend says of one choice of one item."""

    log_likelihood: float
    is_greedy: bool


class Outcome(msgspec.Struct, frozen=True):
    """A task through one backend: accuracy (0..1), and choices per item."""

    accuracy: float
    items: list[list[ScoredChoice]]


def judgement(row: dict[str, Any]) -> Item:
    prompt = f"{row.get('prefix', '')}{row['text']}\nJudgement:"
    return Item(prompt, [f" {label}" for label in row["labels"]], row["label"])


def option_text(row: dict[str, Any]) -> Item:
    """MMLU without examples; what is scored is the text of each option: many tokens."""
    return Item(row["text"], [f" {choice}" for choice in row["choices"]], row["label"])


def option_letter(row: dict[str, Any]) -> Item:
    """MMLU behind the subject's five examples: long prompts that share their beginning."""
    return Item(row["prefix"] + row["text"], [f" {label}" for label in row["labels"]], row["label"])


TASKS: dict[str, tuple[str, Callable[[dict[str, Any]], Item]]] = {
    "moral_stories": ("moral_stories.jsonl", judgement),
    "mmlu_option_texts": ("mmlu.jsonl.gz", option_text),
    "mmlu_five_shot": ("mmlu.jsonl.gz", option_letter),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with classification/")
    parser.add_argument("--model", default=BUNDLED, help='Hugging Face model folder, or "bundled"')
    parser.add_argument("--rows", type=int, default=200, help="per task")


def write_tasks(
    folder: Path, options: argparse.Namespace, tokenizer: Tokenizer
) -> dict[str, list[Item]]:
    """Writes each task's items and its lm-eval description to `folder`; returns the items."""
    written = {}
    for name, (file, make) in TASKS.items():
        rows = raw_rows(options.data / "classification" / file)
        items = [make(row) for row in rows if row["split"] == "test"]
        items = [item for item in items if _fits(item, tokenizer)]
        items = items[:: max(1, len(items) // options.rows)][: options.rows]  # all subjects
        data = folder / f"{name}.jsonl"
        data.write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))
        description = yaml.safe_dump(_description(name, data))
        (folder / f"{name}.yaml").write_text(description, encoding="utf-8")
        written[name] = items
    return written


def _fits(item: Item, tokenizer: Tokenizer) -> bool:
    texts = [item.prompt + choice for choice in item.choices]
    return max(map(len, tokenizer.encode_many(texts))) <= MAX_PROMPT_TOKENS


def _description(name: str, data: Path) -> dict[str, Any]:
    """The task in the terms of lm-eval's YAML files."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(data.parent / "cache"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",  # the choices bring their own space
        "metric_list": [{"metric": "acc"}],
    }


def evaluate(backend: str, arguments: dict[str, object], folder: Path) -> dict[str, Outcome]:
    """Run all tasks through one of lm-eval's models."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        name: Outcome(
            found["results"][name]["acc,none"],
            [
                [ScoredChoice(value, bool(greedy)) for value, greedy in sample["filtered_resps"]]
                for sample in sorted(found["samples"][name], key=lambda s: s["doc_id"])
            ],
        )
        for name in TASKS
    }


def compare(ours: Outcome, theirs: Outcome) -> dict[str, Any]:
    """How far two backends agree on a task. Equal: the same accuracy, the same choice of every
    item, and no log-likelihood apart by more than TOLERANCE."""
    pairs = [
        (a, b)
        for our_item, other in zip(ours.items, theirs.items, strict=True)
        for a, b in zip(our_item, other, strict=True)
    ]
    difference = max(abs(a.log_likelihood - b.log_likelihood) for a, b in pairs)
    picks = [_pick(a) == _pick(b) for a, b in zip(ours.items, theirs.items, strict=True)]
    return {
        "choices": len(pairs),
        "accuracy": ours.accuracy,
        "hf_accuracy": theirs.accuracy,
        "max_difference": difference,
        "items_answered_differently": picks.count(False),
        "greedy_flags_that_differ": sum(a.is_greedy != b.is_greedy for a, b in pairs),
        "is_equal": ours.accuracy == theirs.accuracy and all(picks) and difference <= TOLERANCE,
    }


def _pick(choices: list[ScoredChoice]) -> int:
    return max(range(len(choices)), key=lambda index: choices[index].log_likelihood)


def measure(options: argparse.Namespace) -> Measured:
    model = resolve_model_folder(options.model)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        items = write_tasks(Path(folder), options, Tokenizer.load(model))
        outcomes: dict[str, dict[str, Outcome]] = {}
        with ServerProcess("--model", options.model, *SETTINGS) as server:
            server.wait_healthy()
            for way, arguments in WAYS.items():
                api = {
                    "model": model.name,
                    "tokenizer": str(model),
                    "tokenizer_backend": "huggingface",
                    "base_url": f"{server.url}/v1/completions",
                }
                outcomes[way] = evaluate("local-completions", api | arguments, Path(folder))
        torch.set_num_threads(2)
        hf = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "batch_size": 8}
        outcomes["hf"] = evaluate("hf", hf, Path(folder))
    rows = [
        {"task": name, "items": len(of_task), "sent_as": way}
        | compare(outcomes[way][name], outcomes["hf"][name])
        for name, of_task in items.items()
        for way in WAYS
    ]
    if not all(row["is_equal"] for row in rows):
        raise RuntimeError(f"the two backends do not give the same numbers: {rows}")
    found = {"rows": rows, "lm_eval": importlib.metadata.version("lm_eval")}
    samples = {
        backend: {
            name: [round(choice.log_likelihood, 6) for item in task.items for choice in item]
            for name, task in by_task.items()
        }
        for backend, by_task in outcomes.items()
    }
    return Measured(samples, found, {"serve": SETTINGS})


def tables(summary: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{row['task']}, {row['sent_as']}",
            str(row["items"]),
            str(row["choices"]),
            f"{row['accuracy']:.4f}",
            f"{row['hf_accuracy']:.4f}",
            f"{row['max_difference']:.1e}",
        ]
        for row in summary["rows"]
    ]
    columns = ["task, sent as", "items", "choices", "accuracy", "hf", "largest difference"]
    return [Table(f"lm-eval {summary['lm_eval']}, float32", columns, rows)]


CASE = documented_case(__doc__, "lm-eval", measure, tables, add_options)
