"""Make the bundled checkpoint: tokenizer, training, checkpoint, evaluation, model card.

python -m training.bundled.train --data DATA
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.bundled.card import CardInput, write_card
from training.bundled.chat import EXAMPLES, answer, evaluate_chat
from training.bundled.data import Recipe
from training.bundled.evaluate import evaluate_checkpoint, layer_balance, load, table
from training.bundled.loop import TrainConfig, TrainJob, TrainReport, train
from training.bundled.network import equal_logits
from training.bundled.tasks import TASKS, TaskRow, read_rows
from training.bundled.tokenizer import check_contract, train_tokenizer

MAX_FOLDER_BYTES = 12_000_000
LOGIT_TOLERANCE = 1e-3
CHATS_PER_TASK = 25


def check_logits(model: Qwen3MoeForCausalLM) -> None:
    """Raise unless our forward pass and that of `transformers` agree in float32."""
    for shape in ((4, 60), (1, 1500)):
        ids = torch.randint(3, model.config.vocab_size, shape)
        difference = equal_logits(model, ids)
        if difference > LOGIT_TOLERANCE:
            raise ValueError(
                f"logits of shape {shape} differ by {difference:.2e} > {LOGIT_TOLERANCE:.0e}"
            )


def save(trained: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16, two shards or more), configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model: Any = trained.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(str(folder), max_shard_size="6MB")
    tokenizer.save_pretrained(str(folder))
    # transformers 5 renames these; the old names are what other readers of the folder know.
    amend_json(folder / "config.json", {"num_experts": model.config.num_experts})
    amend_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    for path in folder.iterdir():
        path.chmod(0o644)


def amend_json(path: Path, changes: dict[str, Any]) -> None:
    """Set some keys of a JSON object in place."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2) + "\n")


def check_size(folder: Path) -> int:
    """Return the bytes of the folder; raise if over `MAX_FOLDER_BYTES`."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_FOLDER_BYTES:
        raise ValueError(f"{folder} has {size} bytes, at most {MAX_FOLDER_BYTES} are allowed")
    return size


def finish(
    folder: Path, data: Path, config: TrainConfig, report: TrainReport, threads: int
) -> None:
    """Evaluate the written folder as anyone would load it, and write its card."""
    results = evaluate_checkpoint(folder, data, torch.float32)
    model, tokenizer = load(folder, torch.float32)
    test_rows = {task.name: read_rows(task, data, "test") for task in TASKS}
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    total = sum(p.numel() for p in model.parameters())
    idle = experts - experts * model.config.num_experts_per_tok // model.config.num_experts
    card = CardInput(
        config=config,
        report=report,
        results=results,
        train_rows={task.name: len(read_rows(task, data, "train")) for task in TASKS},
        chat=evaluate_chat(model, tokenizer, test_rows, per_task=CHATS_PER_TASK, seed=config.seed),
        chat_examples=[(question, answer(model, tokenizer, question)[0]) for question in EXAMPLES],
        parameters=total,
        active_parameters=total - idle,
        threads=threads,
    )
    write_card(card, folder)
    print(table(results))
    print(
        "max/mean expert load per layer:",
        json.dumps([round(value, 2) for value in layer_balance(results)]),
    )
    print(
        f"chats: {card.chat.stopped_fraction:.1%} stop, "
        f"{card.chat.right_label_fraction:.1%} are right"
    )


def make(data: Path, folder: Path, config: TrainConfig, threads: int) -> None:
    """Create and check a model folder from data."""
    rows: dict[str, list[TaskRow]] = {task.name: read_rows(task, data, "train") for task in TASKS}
    tokenizer = train_tokenizer(rows)
    checked = sum(check_contract(tokenizer, task, read_rows(task, data, "test")) for task in TASKS)
    print(f"{len(tokenizer)} tokens; every label is one token after each of {checked} test prompts")
    model, report = train(TrainJob(tokenizer, rows, config, Recipe()), threads)
    print(
        f"{report.tokens} tokens, {report.wall_s / 60:.1f} min of wall time, "
        f"{report.cpu_s / 60:.1f} min of CPU time"
    )
    check_logits(model)
    save(model, tokenizer, folder)
    finish(folder, data, config, report, threads)
    print(f"{folder}: {check_size(folder)} bytes")


def main() -> None:
    """Parse the command line and make the checkpoint."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(
        description="Make the bundled checkpoint.",
        epilog="example: python -m training.bundled.train --data DATA --out models/bundled",
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds classification/*.jsonl[.gz]"
    )
    parser.add_argument("--out", type=Path, default=Path("models/bundled"), help="folder to write")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--tokens", type=int, default=defaults.tokens, help="train on this many tokens ..."
    )
    parser.add_argument(
        "--minutes", type=float, default=defaults.minutes, help="... but stop after this wall time"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make(
        args.data,
        args.out,
        TrainConfig(seed=args.seed, tokens=args.tokens, minutes=args.minutes),
        args.threads,
    )


if __name__ == "__main__":
    main()
