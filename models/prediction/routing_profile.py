"""Predictors of a checkpoint's routing in a file that may also contain counts (routing_counts.py).

    mean.L          [E, D] float32   mean unweighted output of each expert ("default vectors"),
                                     with its part of the shared experts' mean
    frequency.L     [E] float32      fraction of the tokens that go to it
    map.L           [D + E + 1, E]   least squares from x, the weights of layer L's experts, and 1
                                     to the logits of the next layer's router
    estimator.NAME                   of a network (estimator.py)
    tokens          [V, K] int32     likeliest experts of the first MoE layer, by token id
    precision.KIND  [L, K]           of rank k at layer L, on held-out texts

Source: Speculating Experts, Sections 3.1 to 3.3 and 6.1; the maps and the table are ours
(docs/deviations.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts.errors import CheckpointError
from models.prediction.estimator import Estimator, shapes
from models.prediction.profile_file import (
    CHECKPOINT,
    MAKE_ONE,
    checked_tensor,
    checkpoint_digest,
    has_predictor,
    open_profile,
    write_arrays,
)
from models.prediction.routing_counts import RoutingCounts
from models.spec.model import ModelSpec
from models.spec.safetensors_file import SafetensorsFile


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingProfile:
    """Predictors by layer (`maps`: not of the last one); precision: by predictor kind."""

    means: Mapping[int, Tensor]
    frequencies: Mapping[int, Tensor]
    maps: Mapping[int, Tensor]
    estimator: Estimator
    tokens_VK: Tensor
    precision: Mapping[str, Tensor]

    def to(self, device: torch.device) -> RoutingProfile:
        """Return the profile with the tensors for predictions on `device`."""
        if device.type == "cpu":
            return self

        def to_device(by_layer: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor.to(device) for layer, tensor in by_layer.items()}

        estimator = {name: each.to(device) for name, each in self.estimator.tensors().items()}
        return dataclasses.replace(
            self,
            means=to_device(self.means),
            maps=to_device(self.maps),
            estimator=Estimator(**estimator),
        )

    def write(self, path: Path, folder: Path, counts: RoutingCounts | None = None) -> None:
        """Write the profile of `folder`, with counts if given. Raises CheckpointError."""
        tensors = {
            **{f"mean.{layer}": tensor for layer, tensor in self.means.items()},
            **{f"frequency.{layer}": tensor for layer, tensor in self.frequencies.items()},
            **{f"map.{layer}": tensor for layer, tensor in self.maps.items()},
            **{f"estimator.{name}": each for name, each in self.estimator.tensors().items()},
            "tokens": self.tokens_VK,
            **{f"precision.{kind}": tensor for kind, tensor in self.precision.items()},
        }
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        digest = {CHECKPOINT: np.frombuffer(checkpoint_digest(folder), np.uint8)}
        write_arrays(path, arrays | (digest if counts is None else counts.arrays()))

    @staticmethod
    def read(path: Path, folder: Path, spec: ModelSpec) -> RoutingProfile:
        """Read the profile of the checkpoint in `folder`. Raises CheckpointError."""
        file = open_profile(path, folder)
        if not has_predictor(file):
            raise CheckpointError(
                f"{path}: a routing profile with counts but without predictors; {MAKE_ONE}"
            )
        experts, hidden = spec.num_experts, spec.hidden_size

        def by_layer(name: str, layers: Iterable[int], *shape: int) -> dict[int, Tensor]:
            return {layer: _tensor(file, f"{name}.{layer}", shape) for layer in layers}

        estimator = {
            name: _tensor(file, f"estimator.{name}", shape)
            for name, shape in shapes(hidden, spec.num_layers, experts).items()
        }
        kinds = [name for name in file.entries if name.startswith("precision.")]
        shape = (spec.num_layers, spec.top_k)
        return RoutingProfile(
            by_layer("mean", spec.moe_layers, experts, hidden),
            by_layer("frequency", spec.moe_layers, experts),
            by_layer("map", spec.moe_layers[:-1], hidden + experts + 1, experts),
            Estimator(**estimator),
            _ids(file, "tokens", (spec.vocab_size, spec.top_k), experts),
            {name.partition(".")[2]: _tensor(file, name, shape) for name in kinds},
        )


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: str = "F32") -> Tensor:
    tensor = checked_tensor(file, name, dtype, shape)
    if not tensor.isfinite().all():
        raise CheckpointError(f"{file.path}: {name}: not all values are finite; {MAKE_ONE}")
    return tensor


def _ids(file: SafetensorsFile, name: str, shape: tuple[int, ...], experts: int) -> Tensor:
    ids = _tensor(file, name, shape, "I32")
    if not ((ids >= 0) & (ids < experts)).all():
        raise CheckpointError(f"{file.path}: {name}: not all values are experts; {MAKE_ONE}")
    return ids
