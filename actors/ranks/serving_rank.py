"""Common parts of attention ranks and prefill workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from actors.batching.admission import QueueDrain, RankAdmission
from actors.batching.observer import BatchTraces
from actors.ranks.memory import bound_memory
from actors.ranks.rank import Rank, RankHooks, Recording
from actors.ranks.serving_loop import Intake, ServingLoop, ServingParts
from actors.rpc.client_server import ClientServer
from contracts.clock import monotonic_s
from contracts.config import ScheduleConfig, TandemConfig
from contracts.errors import CheckpointError
from contracts.ranks import RankReady, RankSpec
from models.decoder.decoder import AttentionHalf
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line


class ServedModel(NamedTuple):
    """Limits that admission needs."""

    vocab_size: int
    max_context_tokens: int


def prepare_process(spec: RankSpec) -> None:
    """Set up threads and memory, before the first product and before computing threads start."""
    torch.set_num_threads(spec.config.groups.torch_threads)
    bound_memory()


def load_half(spec: RankSpec) -> tuple[AttentionHalf, ServedModel]:
    """Load the attention half. Raises CheckpointError."""
    folder, settings = Path(spec.model_folder), spec.config.model
    model = check_checkpoint(folder)
    half = AttentionHalf.load(
        Checkpoint(folder),
        model,
        dtype=resolve_dtype(model, settings.dtype),
        device=torch.device(spec.device),
        progress=progress_line(spec.name, sys.stderr),
    )
    return half, ServedModel(model.vocab_size, settings.context_tokens(model.max_context_tokens))


def prefill_limits(config: TandemConfig) -> ScheduleConfig:
    """Return the schedule with the batch limits of a prefill worker."""
    return msgspec.structs.replace(
        config.schedule,
        max_batch_tokens=config.prefill.max_batch_tokens,
        max_batch_sequences=config.prefill.max_batch_sequences,
    )


def unusable_checkpoint(spec: RankSpec, half: AttentionHalf) -> CheckpointError:
    """Return the error of a rank whose first pass gave logits that are not finite."""
    return CheckpointError(
        f"{spec.model_folder}: the logits of a first pass are not finite numbers. The "
        f"checkpoint is damaged (fetch it again), or {half.dtype} is too narrow for it "
        "(model.dtype: bfloat16 or float32)"
    )


def serving_rank(
    spec: RankSpec,
    served: ServedModel,
    parts: ServingParts,
    recording: Recording,
    hooks: RankHooks,
    *,
    channel_address: str = "",
    started_s: float,
) -> Rank:
    """Make the rank and listen to clients. started_s: when the construction began."""
    config, pool_blocks = spec.config, parts.scheduler.blocks.num_blocks
    drain = QueueDrain(parts.scheduler, monotonic_s)
    traces = BatchTraces(spec.name, recording.timeline, monotonic_s)
    parts = parts._replace(observers=[*parts.observers, drain, traces])
    clients = ClientServer(spec.name, token=spec.token, wake=parts.executor.wake, watch=parts.watch)
    admission = RankAdmission(
        spec.name,
        served.vocab_size,
        served.max_context_tokens,
        pool_blocks * config.kv.block_tokens,
        config.schedule.max_waiting,
        drain.retry_after_s,
    )
    recording.metrics.read_blocks(lambda: parts.scheduler.blocks.counts)
    loop = ServingLoop(spec.name, Intake(clients, admission, config.kv.block_tokens), parts)
    ready = RankReady(
        name=spec.name,
        pid=os.getpid(),
        channel_address=channel_address,
        client_address=clients.listen(spec.host, deadline_s=config.channel.connect_timeout_s),
        load_s=monotonic_s() - started_s,
        kv_blocks=pool_blocks,
    )
    return Rank(spec, ready, loop, recording.metrics, recording, hooks)
