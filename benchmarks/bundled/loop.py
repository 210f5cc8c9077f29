"""The training loop of the bundled checkpoint."""

import time
from typing import Any

import msgspec
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from benchmarks.bundled.data import Batch, ExampleSource, Recipe
from benchmarks.bundled.network import FastForward, Noise, make_config
from benchmarks.bundled.optimizer import make_optimizers
from benchmarks.bundled.tasks import TASKS, Row
from benchmarks.bundled.tokenizer import label_ids


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One training run; it ends after `tokens` tokens or `minutes`, whichever is first."""

    tokens: int = 16_000_000
    minutes: float = 26.0
    seed: int = 0
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    dropout_fraction: float = 0.1
    smoothing_fraction: float = 0.1  # over the labels of the task
    text_loss_weight: float = 0.5
    balance_loss_weight: float = 0.02
    warmup_fraction: float = 0.03


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run took."""

    steps: int
    tokens: int
    wall_s: float
    cpu_s: float


class Trainer:
    """Owns model, optimizers and random state of one run."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        rows: dict[str, list[Row]],
        config: TrainConfig,
        recipe: Recipe,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.source = ExampleSource(tokenizer, rows, recipe, config.seed)
        architecture = make_config(len(tokenizer), self.source.end_id, self.source.pad_id)
        self.model = Qwen3MoeForCausalLM(architecture).float()
        self._fast = FastForward(self.model)
        self._noise = Noise(config.dropout_fraction)
        self._optimizers = make_optimizers(
            self.model,
            muon_lr=config.muon_lr,
            adam_lr=config.adam_lr,
            weight_decay=config.weight_decay,
        )
        self._base_lrs = [
            group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups
        ]
        self._labels, self._label_mask = _label_table(tokenizer)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Total loss and mean label loss of one batch."""
        output = self._fast(batch.ids_BS, batch.valid_BS, self._noise)
        positions = torch.cat((batch.label_positions, batch.text_positions))
        logits = self._fast.logits(output.hidden_TD, positions)
        labels = batch.label_targets.numel()
        label_logp = logits[:labels].log_softmax(-1)
        hard = -label_logp.gather(1, batch.label_targets[:, None])[:, 0]
        mask = self._label_mask[batch.label_tasks]
        soft = -(label_logp.gather(1, self._labels[batch.label_tasks]) * mask).sum(-1) / mask.sum(
            -1
        )
        label_loss = hard.lerp(soft, self.config.smoothing_fraction).mean()
        text_loss = functional.cross_entropy(logits[labels:], batch.text_targets)
        weights = (1.0, self.config.text_loss_weight, self.config.balance_loss_weight)
        parts = (label_loss, text_loss, output.balance_loss)
        return torch.stack(
            [w * part for w, part in zip(weights, parts, strict=True)]
        ).sum(), hard.mean().detach()

    def _set_lr(self, progress: float) -> None:
        warmup = self.config.warmup_fraction
        scale = progress / warmup if progress < warmup else (1 - progress) / (1 - warmup)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self._base_lrs, strict=True):
            group["lr"] = base * max(scale, 0.002)

    def _step(self, batch: Batch, progress: float) -> float:
        self._set_lr(progress)
        loss, label_loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(label_loss)

    def run(self) -> TrainReport:
        """Train to the end of the budget with a progress bar; returns what it took."""
        config, steps, tokens, smooth = self.config, 0, 0, 0.0
        start_wall, start_cpu, progress = time.perf_counter(), time.process_time(), 0.0
        batches = self.source.batches()
        with _progress_bar() as bar:
            job = bar.add_task("training", total=1.0, note="")
            while progress < 1:
                batch = next(batches)
                label_loss = self._step(batch, progress)
                smooth += (label_loss - smooth) * max(0.01, 1 / (steps + 1))
                steps, tokens = steps + 1, tokens + int(batch.valid_BS.sum())
                spent_s = time.perf_counter() - start_wall
                progress = max(tokens / config.tokens, spent_s / 60 / config.minutes)
                note = f"label loss {smooth:.3f}, {tokens / spent_s:,.0f} tokens/s"
                bar.update(job, completed=progress, note=note)
        wall_s, cpu_s = time.perf_counter() - start_wall, time.process_time() - start_cpu
        return TrainReport(steps=steps, tokens=tokens, wall_s=wall_s, cpu_s=cpu_s)


def _label_table(tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Label ids [tasks, most labels] and their mask, padded with id 0."""
    ids = [label_ids(tokenizer, task) for task in TASKS]
    width = max(map(len, ids))
    table = torch.tensor([some + [0] * (width - len(some)) for some in ids])
    mask = torch.tensor([[1.0] * len(some) + [0.0] * (width - len(some)) for some in ids])
    return table, mask


def _progress_bar() -> Progress:
    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
    ]
    columns += [TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, refresh_per_second=0.5)
