"""A model with 64 experts, six to a token, trained in minutes, and the traces of its routing.

    python -m benchmarks.placement.fine_grained --data DATA --output fine.npz      (six minutes)

It is the bundled checkpoint's training with other sizes, on one core. So short a training leaves
the routing closer to token ids than a mature model's is: what it shows is an upper end.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from benchmarks.placement.traces import BUNDLED, all_traces, write
from training.bundled.data import ExampleSource, Recipe, TrainBatch
from training.bundled.loop import TrainConfig
from training.bundled.network import FastForward, Noise, make_config
from training.bundled.optimizer import make_optimizers
from training.bundled.tasks import TASKS, read_rows

LOG_STEPS = 100


def fine_grained(tokenizer: Any) -> Qwen3MoeForCausalLM:
    """Untrained."""
    config = make_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    config.num_hidden_layers, config.num_experts, config.num_experts_per_tok = 3, 64, 6
    config.moe_intermediate_size = 48
    return Qwen3MoeForCausalLM(config).float()


def trained(tokenizer: Any, data: Path, config: TrainConfig) -> tuple[Qwen3MoeForCausalLM, int]:
    """The model, and the tokens it saw."""
    torch.manual_seed(config.seed)
    model = fine_grained(tokenizer)
    fast, noise = FastForward(model), Noise(config.dropout_fraction)
    optimizers = make_optimizers(list(model.named_parameters()), config)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    rows = {task.name: read_rows(task, data, "train") for task in TASKS}
    batches = ExampleSource(tokenizer, rows, Recipe(), config.seed).batches()
    start, tokens, steps, part = time.perf_counter(), 0, 0, 0.0
    while part < 1:
        warm = config.warmup_fraction
        scale = part / warm if part < warm else (1 - part) / (1 - warm)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * max(scale, 0.002)
        batch = next(batches)
        loss = _loss(fast, batch, noise, config)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        tokens, steps = tokens + int(batch.valid_BS.sum()), steps + 1
        part = max(tokens / config.tokens, (time.perf_counter() - start) / 60 / config.minutes)
        if steps % LOG_STEPS == 0:
            print(f"{part:.0%}: {tokens} tokens, loss {float(loss):.3f}", flush=True)
    return model, tokens


def _loss(fast: FastForward, batch: TrainBatch, noise: Noise, config: TrainConfig) -> Tensor:
    output = fast(batch.ids_BS, batch.valid_BS, noise)
    positions = torch.cat((batch.label_positions, batch.text_positions))
    logits = fast.logits(output.hidden_TD, positions)
    labels = batch.label_targets.numel()
    label_loss = functional.cross_entropy(logits[:labels], batch.label_targets)
    text_loss = functional.cross_entropy(logits[labels:], batch.text_targets)
    total = label_loss + config.text_loss_weight * text_loss
    return total + config.balance_loss_weight * output.balance_loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=900_000, help="train on so many ...")
    parser.add_argument("--minutes", type=float, default=8.0, help="... or for so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED))
    config = TrainConfig(tokens=options.tokens, minutes=options.minutes)
    model, tokens = trained(tokenizer, options.data, config)
    found = all_traces(model, tokenizer, options.data)
    write(options.output, found)
    print(f"{tokens} tokens; traces of", {kind: len(each.ids_P2) for kind, each in found.items()})


if __name__ == "__main__":
    main()
