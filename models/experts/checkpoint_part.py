"""Some experts of a layer, straight from the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.experts.expert_layout import ExpertLayout, of_expert
from models.experts.expert_loading import copy_experts
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader


class CheckpointParts:
    """Reads, undoes quantisation, and lays out, at every call. keep: leaves the pages that it has
    read in memory, to be read again."""

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout, *, keep: bool = False) -> None:
        self._checkpoint, self._layout, self._keep = checkpoint, layout, keep
        self._loader = Loader(checkpoint, layout.dtype, torch.device("cpu"), None, 0)

    def copy_part(self, layer: int, first: int, last: int, into: Sequence[Tensor]) -> None:
        """Fills `into`, the pieces of experts [first, last). Raises CheckpointError."""
        experts = range(first, last)
        if self._layout.packed:
            self._pack(layer, experts, into)
        else:
            self._copy(layer, experts, into)
        if not self._keep:
            self._loader.layer_done()

    def _pack(self, layer: int, experts: range, into: Sequence[Tensor]) -> None:
        shapes = self._layout.plain_shapes
        plain = [torch.empty((1, *shape), dtype=self._layout.dtype) for shape in shapes]
        for number, expert in enumerate(experts):
            self._copy(layer, range(expert, expert + 1), plain)
            self._layout.pack(plain, of_expert(into, number, len(experts)))

    def _copy(self, layer: int, experts: range, into: Sequence[Tensor]) -> None:
        copy_experts(self._checkpoint, self._layout.spec, layer, experts, self._loader.copy, into)
