"""Workers that gather experts from each other, in the test's own process: real servers and sockets,
no compute around them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.weight_shard import HeldShard, PartSource, Shard, ShardWindow
from actors.weight_source import PeerSource, own_part
from contracts.worker import Group, WorkerSpec
from models.checkpoint import Checkpoint, check_checkpoint
from models.checkpoint_part import CheckpointParts
from models.expert_store import ExpertBuffer
from tests.group_harness import group_config

TOKEN = secrets.token_bytes(32)


def worker_spec(
    folder: Path, rank: int, workers: int, *, backend: str, token: bytes = TOKEN, **fields: Any
) -> WorkerSpec:
    fields.setdefault("config", group_config(prefill={"experts": "gathered"}))
    return WorkerSpec(
        group=Group.PREFILL,
        rank=rank,
        attention_ranks=0,
        expert_ranks=0,
        prefill_ranks=workers,
        model_folder=str(folder),
        token=token,
        epoch=fields.pop("epoch", 1),
        device=fields.pop("device", "cpu"),
        backend=backend,
        **fields,
    )


def parts_of(folder: Path) -> CheckpointParts:
    return CheckpointParts(Checkpoint(folder), check_checkpoint(folder), torch.float32)


def make_source(
    spec: WorkerSpec, *, window: int | None = None, host: PartSource | None = None
) -> PeerSource:
    """In float32. window: of a shard that comes from `host`, as many layers at a time."""
    folder = Path(spec.model_folder)
    model = check_checkpoint(folder)
    host = host or parts_of(folder)
    part = own_part(spec, model, torch.float32)
    layers = model.moe_layers[1:]
    shard: Shard
    shard = ShardWindow(layers, part, host, window) if window else HeldShard(layers, part, host)
    return PeerSource(spec, model, part, shard, parts_of(folder))


def join_all(sources: Sequence[PeerSource]) -> dict[str, str]:
    """Everybody's address, which everybody has been told."""
    addresses = {source.name: source.listen("127.0.0.1") for source in sources}
    for source in sources:
        source.connect(addresses)
    return addresses


@contextmanager
def gathering(
    folder: Path, workers: int, *, backend: str, window: int | None = None, **fields: Any
) -> Iterator[list[PeerSource]]:
    specs = [worker_spec(folder, r, workers, backend=backend, **fields) for r in range(workers)]
    sources = [make_source(spec, window=window) for spec in specs]
    try:
        join_all(sources)
        yield sources
    finally:
        for source in sources:
            source.close()


def new_buffer(folder: Path) -> ExpertBuffer:
    model = check_checkpoint(folder)
    buffer = ExpertBuffer(model, model.num_experts, torch.float32, torch.device("cpu"))
    for tensor in buffer.tensors:
        tensor.fill_(torch.nan)
    return buffer


def expected(folder: Path, layer: int) -> tuple[torch.Tensor, ...]:
    buffer, experts = new_buffer(folder), check_checkpoint(folder).num_experts
    parts_of(folder).copy_part(layer, 0, experts, buffer.tensors)
    return buffer.tensors


def assert_layer(folder: Path, buffer: ExpertBuffer, layer: int) -> None:
    for got, wanted in zip(buffer.tensors, expected(folder, layer), strict=True):
        assert torch.equal(got, wanted)
