"""The training loop of the bundled checkpoint: one process per core, weights in shared memory.

Single-threaded processes with gradients averaged through memory beat one process with as many
threads: the operations are small, and threads would meet after each of them.
"""

import time
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import msgspec
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, multiprocessing
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.bundled.data import ExampleSource, Recipe, TrainBatch
from training.bundled.network import FastForward, Noise, make_config
from training.bundled.optimizer import make_optimizers
from training.bundled.tasks import TASKS, TaskRow
from training.bundled.tokenizer import label_ids

BARRIER_TIMEOUT_S = 300.0
LOG_STEPS = 250  # where there is no terminal for the progress bar


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
    text_loss_weight: float = 0.1
    balance_loss_weight: float = 0.02
    warmup_fraction: float = 0.03


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Size and duration of a run."""

    steps: int
    tokens: int
    wall_s: float
    cpu_s: float


class Shared(NamedTuple):
    """Shared memory of a run's workers: weights, and gradients [ranks], as flat buffers.

    A step of rank r, which owns some of the parameters:

        forward, backward, write gradients | barrier | average, update own parameters | barrier

    No rank reads weights while they change, and every parameter is updated once.
    """

    weights: Tensor
    gradients: Tensor  # [ranks, elements]
    tokens: Tensor  # [ranks], since the start
    cpu_s: Tensor  # [ranks]
    progress: Tensor  # [1], 0..1, written by rank 0
    barrier: Barrier

    def sync(self) -> None:
        """Wait for the other ranks; raises `BrokenBarrierError` if one has exited."""
        self.barrier.wait(BARRIER_TIMEOUT_S)


class TrainJob(NamedTuple):
    """Parameters of every rank."""

    tokenizer: PreTrainedTokenizerFast
    rows: dict[str, list[TaskRow]]
    config: TrainConfig
    recipe: Recipe


class Worker:
    """One rank, on one thread: draws its own batches and updates the parameters that it owns."""

    def __init__(self, job: TrainJob, shared: Shared, rank: int) -> None:
        self._config, self._shared, self._rank = job.config, shared, rank
        seed = job.config.seed * 1000 + rank
        torch.manual_seed(seed)
        self.model = build_model(job.tokenizer)
        self._slices = _adopt(self.model, shared.weights)
        self._fast = FastForward(self.model)
        self._noise = Noise(job.config.dropout_fraction)
        self._batches = ExampleSource(job.tokenizer, job.rows, job.recipe, seed).batches()
        self._owned = _owned(self.model, rank, shared.gradients.shape[0])
        self._optimizers = make_optimizers(
            self._owned,
            muon_lr=job.config.muon_lr,
            adam_lr=job.config.adam_lr,
            weight_decay=job.config.weight_decay,
        )
        self._base_lrs = [group["lr"] for group in self._groups()]
        self._labels, self._label_mask = _label_table(job.tokenizer)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _loss(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return the total loss and the mean label loss of one batch."""
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
        label_loss = hard.lerp(soft, self._config.smoothing_fraction).mean()
        text_loss = functional.cross_entropy(logits[labels:], batch.text_targets)
        total = label_loss + self._config.text_loss_weight * text_loss
        total = total + self._config.balance_loss_weight * output.balance_loss
        return total, hard.mean().detach()

    def _set_lr(self, progress: float) -> None:
        warmup = self._config.warmup_fraction
        scale = progress / warmup if progress < warmup else (1 - progress) / (1 - warmup)
        for group, base in zip(self._groups(), self._base_lrs, strict=True):
            group["lr"] = base * max(scale, 0.002)

    def step(self) -> float:
        """Run one step of all ranks together; return this rank's mean label loss."""
        shared, batch = self._shared, next(self._batches)
        self._set_lr(float(shared.progress))
        self.model.zero_grad()
        loss, label_loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                shared.gradients[self._rank, self._slices[name]] = param.grad.flatten()
        shared.tokens[self._rank] += int(batch.valid_BS.sum())
        shared.cpu_s[self._rank] = time.process_time()
        shared.sync()
        for name, param in self._owned:
            param.grad = shared.gradients[:, self._slices[name]].mean(0).view_as(param)
        for optimizer in self._optimizers:
            optimizer.step()
        return float(label_loss)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """Return a model with random weights in float32."""
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return Qwen3MoeForCausalLM(make_config(len(tokenizer), end_id, pad_id)).float()


def _adopt(model: Qwen3MoeForCausalLM, weights: Tensor) -> dict[str, slice]:
    """Make the parameters views of `weights`; return the slice of each."""
    slices, start = {}, 0
    for name, param in model.named_parameters():
        slices[name] = slice(start, start + param.numel())
        param.data = weights[slices[name]].view_as(param)
        start += param.numel()
    return slices


def _owned(
    model: Qwen3MoeForCausalLM, rank: int, ranks: int
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that `rank` updates, about as many elements for each rank."""
    loads, owned = [0] * ranks, []
    for name, param in sorted(model.named_parameters(), key=lambda pair: -pair[1].numel()):
        owner = loads.index(min(loads))
        loads[owner] += param.numel()
        if owner == rank:
            owned.append((name, param))
    return owned


def _run_other(job: TrainJob, shared: Shared, rank: int) -> None:
    """Run any rank but the first."""
    torch.set_num_threads(1)
    worker = Worker(job, shared, rank)
    shared.sync()
    while float(shared.progress) < 1:
        worker.step()
        shared.sync()


def _run_first(worker: Worker, shared: Shared, config: TrainConfig) -> TrainReport:
    """Run rank 0, which keeps the time and the progress bar."""
    steps, smooth, start = 0, 0.0, time.perf_counter()
    with _progress_bar() as bar:
        job = bar.add_task("training", total=1.0, note="")
        while float(shared.progress) < 1:
            label_loss = worker.step()
            steps += 1
            smooth += (label_loss - smooth) * max(0.01, 1 / steps)
            tokens, spent_s = int(shared.tokens.sum()), time.perf_counter() - start
            progress = max(tokens / config.tokens, spent_s / 60 / config.minutes)
            shared.progress[0] = progress
            note = f"label loss {smooth:.3f}, {tokens / spent_s:,.0f} tokens/s"
            bar.update(job, completed=progress, note=note)
            if not bar.console.is_terminal and steps % LOG_STEPS == 0:
                print(f"{progress:.1%} {note}", flush=True)
            shared.sync()
    cpu_s = float(shared.cpu_s.sum())
    return TrainReport(steps=steps, tokens=tokens, wall_s=spent_s, cpu_s=cpu_s)


def _shared(x: Tensor) -> Tensor:
    moved: Tensor = x.share_memory_()  # type: ignore[no-untyped-call]
    return moved


def train(job: TrainJob, ranks: int) -> tuple[Qwen3MoeForCausalLM, TrainReport]:
    """Train with `ranks` processes of one thread each; return the model and a report."""
    torch.manual_seed(job.config.seed)
    start = torch.nn.utils.parameters_to_vector(build_model(job.tokenizer).parameters()).detach()
    context = multiprocessing.get_context("spawn")
    shared = Shared(
        weights=_shared(start),
        gradients=_shared(torch.zeros(ranks, start.numel())),
        tokens=_shared(torch.zeros(ranks, dtype=torch.long)),
        cpu_s=_shared(torch.zeros(ranks, dtype=torch.double)),
        progress=_shared(torch.zeros(1)),
        barrier=context.Barrier(ranks),
    )
    others = [
        context.Process(target=_run_other, args=(job, shared, rank), daemon=True)
        for rank in range(1, ranks)
    ]
    for other in others:
        other.start()
    torch.set_num_threads(1)
    worker = Worker(job, shared, 0)
    shared.sync()
    report = _run_first(worker, shared, job.config)
    for other in others:
        other.join()
    torch.set_num_threads(ranks)
    return worker.model, report


def _label_table(tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return label ids [tasks, most labels] and their mask, padded with id 0."""
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
