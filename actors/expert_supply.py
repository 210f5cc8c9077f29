"""Where a prefill worker has its experts from: the store that its configuration names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import torch

from contracts.errors import ConfigError
from contracts.worker import WorkerSpec
from models.checkpoint import Checkpoint
from models.expert_store import ExpertStore, ResidentStore
from models.loading import progress_line
from models.moe import ExpertHalf
from models.spec import ModelSpec


class ExpertSupply(Protocol):
    """A store and what stands behind it. address: where peers fetch this worker's part, "" if
    nowhere."""

    store: ExpertStore
    address: str

    def connect(self, addresses: dict[str, str]) -> None:
        """The other workers: name -> address. Called again, with all, when one was replaced; from
        another thread than the store's. Raises ChannelError."""

    def close(self) -> None:
        """Ends the store too. May be called twice."""


class OwnSupply:
    """Nothing comes from other workers."""

    address = ""

    def __init__(self, store: ExpertStore) -> None:
        self.store = store

    def connect(self, addresses: dict[str, str]) -> None:
        """There is nobody to join."""

    def close(self) -> None:
        self.store.close()


def expert_supply(spec: WorkerSpec, model: ModelSpec, dtype: torch.dtype) -> ExpertSupply:
    """As `spec.config.prefill.experts` says. Raises CheckpointError, ResourceError, ConfigError."""
    kind = spec.config.prefill.experts
    if kind == "resident":
        return OwnSupply(_resident(spec, model, dtype))
    raise ConfigError(f"prefill.experts={kind} is not available; use resident")


def _resident(spec: WorkerSpec, model: ModelSpec, dtype: torch.dtype) -> ResidentStore:
    experts = ExpertHalf.load(
        Checkpoint(Path(spec.model_folder)),
        model,
        range(model.num_experts),
        dtype=dtype,
        device=torch.device(spec.device),
        progress=progress_line(spec.name, sys.stderr),
    )
    return ResidentStore(experts)
