"""Some experts of a layer, straight from the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.checkpoint import Checkpoint
from models.expert_loading import copy_experts
from models.loading import Loader
from models.spec import ModelSpec


class CheckpointParts:
    """Reads, and undoes quantisation and layout, at every call."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._loader = Loader(checkpoint, dtype, torch.device("cpu"), None, 0)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        """Fills `into`, of experts [first, last), a tensor for each of `expert_shapes`. Raises
        CheckpointError."""
        experts = range(first, last)
        copy_experts(self._checkpoint, self._spec, layer, experts, self._loader, into)
        self._loader.layer_done()
