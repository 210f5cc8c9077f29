"""Tensors of the paged KV pool. The block manager owns the assignment of blocks.

Shapes: P = num_blocks * block_tokens slots, T new tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.decoder.batch import AttentionBatch
from models.spec.model import ModelSpec


def kv_entry_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return the [heads, size] of a token's entries per layer: K and V, or one latent."""
    if spec.latent is not None:
        return ((1, spec.latent.entry_dim),)
    return ((spec.num_kv_heads, spec.head_dim),) * 2


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the pool bytes per token over all layers."""
    elements = sum(math.prod(shape) for shape in kv_entry_shapes(spec))
    return spec.num_layers * elements * dtype.itemsize


class KvPool:
    """One tensor [P, heads, size] per layer and entry, zeroed so that padding never reads a NaN.

    Block b holds slots b * block_tokens .. (b+1) * block_tokens - 1. one_layer: all layers share
    the same tensors, for a batch that runs alone through all layers and is not read again.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        one_layer: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = torch.device(device)
        slots = num_blocks * block_tokens
        kept = [
            tuple(
                torch.zeros(slots, *shape, dtype=dtype, device=self.device)
                for shape in kv_entry_shapes(spec)
            )
            for _ in range(1 if one_layer else spec.num_layers)
        ]
        self.num_bytes = sum(tensor.nbytes for layer in kept for tensor in layer)
        self._layers = tuple(kept * spec.num_layers if one_layer else kept)

    def entries(self, layer: int) -> tuple[Tensor, ...]:
        """Return (K, V) of a layer, or its latents alone, each [P, heads, size]."""
        return self._layers[layer]

    def write(self, layer: int, batch: AttentionBatch, *values: Tensor) -> None:
        """Store one [T, heads, size] tensor per entry, then make the batch's slot copies."""
        for pool, value in zip(self._layers[layer], values, strict=True):
            pool.index_copy_(0, batch.slots_T, value)
            if batch.copies is not None:
                copied = pool.index_select(0, batch.copies.from_C)
                pool.index_copy_(0, batch.copies.to_C, copied)
