"""Attention divided by heads among workers (tensor parallelism): the weights of one worker.

    query heads    | 0 1 2 | 3 4 5 |     of worker 0, of worker 1
    KV heads       | 0     | 1     |     those that these queries read: on several workers if needed
    key heads      | 0     | 1     |     of recurrent layers, with their value heads and states

Rows of q, k and v, or of q_b and kv_b, and columns of o are divided; latents and indexers are on
all workers, and the bias of o is on the first one, so that the sum over workers has everything
once. A norm over all heads sums the squares of all workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from contracts.errors import ConfigError
from models.decoder.attention import SharedNorm
from models.decoder.decoder import AttentionHalf
from models.spec.model import ModelSpec
from models.spec.recurrent import RecurrentSpec
from models.weights.checkpoint import Checkpoint
from models.weights.layout import WeightSpec, mixer_tensors
from models.weights.loading import Loader

_QUERY_ROWS = ("q", "q_bias", "gate", "q_b", "kv_b", "sinks")
_KEY_ROWS = ("k", "k_bias", "v", "v_bias")


def check_divisible(spec: ModelSpec, workers: int) -> None:
    """Raise ConfigError if attention cannot be divided among that many workers."""
    reason = ""
    if spec.recurrent is not None and spec.recurrent.kind == "by_row":
        reason = "has recurrent layers with decay by row"
    elif spec.window_layers is not None:
        reason = "has other KV heads in layers with a window"
    if reason:
        mode = "prefill.experts=shuffled"
        raise ConfigError(f"{mode}: {spec.architecture} {reason}; use gathered")
    heads, kind = spec.num_heads, "attention heads"
    if spec.recurrent is not None and spec.recurrent.key_heads < heads:
        heads, kind = spec.recurrent.key_heads, "key heads of recurrent layers"
    if workers > heads:
        raise ConfigError(
            f"groups.prefill_ranks={workers} with prefill.experts=shuffled: more than the {heads} "
            f"{kind}; start fewer, or use gathered"
        )


class HeadShare(NamedTuple):
    """Heads of a worker. keys: KV heads that its queries read, one per group of equal size.

    With groups of different sizes each query has a KV head of its own, so that one may repeat.
    counted: places in `keys` of those that no worker before it has, once each. key_heads: of
    recurrent layers.
    """

    worker: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    counted: tuple[int, ...]
    key_heads: tuple[int, ...]

    def part(self, role: str, whole: Tensor, spec: ModelSpec) -> Tensor:
        """Return this worker's part of an attention tensor."""
        norms_all = spec.qk_norm == "projection"
        if role == "o_bias" and self.worker > 0:
            return torch.zeros_like(whole)
        if role == "o":
            return _heads_of(whole.T, spec.num_heads, self.queries).T
        if role in _QUERY_ROWS or (norms_all and role == "q_norm"):
            return _heads_of(whole, spec.num_heads, self.queries)
        if role in _KEY_ROWS or (norms_all and role == "k_norm"):
            return _heads_of(whole, spec.num_kv_heads, self.keys)
        return whole

    def recurrent_part(self, role: str, whole: Tensor, sizes: RecurrentSpec) -> Tensor:
        heads, keys = sizes.key_heads, sizes.key_heads * sizes.key_dim
        if role == "norm":
            return whole
        if role == "o":
            return _heads_of(whole.T, heads, self.key_heads).T
        kinds = [keys, keys, len(whole) - 2 * keys] if role in ("qkv", "conv") else [len(whole)]
        parts = torch.split(whole, kinds)
        return torch.cat([_heads_of(rows, heads, self.key_heads) for rows in parts])


def _heads_of(rows: Tensor, heads: int, chosen: tuple[int, ...]) -> Tensor:
    return rows.reshape(heads, -1, *rows.shape[1:])[list(chosen)].flatten(0, 1)


def head_share(spec: ModelSpec, worker: int, workers: int) -> HeadShare:
    """Return the heads of a worker: near-equal runs of query heads, and of key heads."""
    queries, group = _run(spec.num_heads, worker, workers), spec.num_heads // spec.num_kv_heads
    keys = tuple(query // group for query in queries)
    counts = {keys.count(key) for key in keys}
    keys = tuple(dict.fromkeys(keys)) if len(counts) == 1 else keys
    first = -(-queries[0] // group)  # a worker before has those below
    counted = tuple(keys.index(key) for key in dict.fromkeys(keys) if key >= first)
    key_heads = spec.recurrent.key_heads if spec.recurrent is not None else 0
    return HeadShare(worker, queries, keys, counted, _run(key_heads, worker, workers))


def _run(heads: int, worker: int, workers: int) -> tuple[int, ...]:
    return tuple(range(heads * worker // workers, heads * (worker + 1) // workers))


class _HeadSource:
    """A `TensorSource` of one worker's attention."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, share: HeadShare) -> None:
        self._checkpoint, self._spec, self._share = checkpoint, spec, share
        self._whole = {
            weight_spec.names: (layer, role, weight_spec)
            for layer in range(spec.num_layers)
            for role, weight_spec in mixer_tensors(spec, layer).items()
        }

    def load(self, weight_spec: WeightSpec) -> Tensor:
        layer, role, whole = self._whole[weight_spec.names]
        tensor, sizes = self._checkpoint.load(whole), self._spec.recurrent
        if sizes is not None and layer in sizes.layers:
            return self._share.recurrent_part(role, tensor, sizes)
        return self._share.part(role, tensor, self._spec)

    def release(self) -> None:
        self._checkpoint.release()


def divided_half(
    half: AttentionHalf,
    checkpoint: Checkpoint,
    share: HeadShare,
    total: Callable[[int, Tensor], Tensor],
) -> AttentionHalf:
    """Return a half with the attention of these heads, which shares all other weights.

    total: sum of a layer's [T, 2] over workers. Raises CheckpointError.
    """
    whole, recurrent, norm = half.spec, half.spec.recurrent, None
    if recurrent is not None:
        heads = len(share.key_heads)
        recurrent = msgspec.structs.replace(
            recurrent, key_heads=heads, value_heads=heads * recurrent.heads_per_key
        )
    spec = msgspec.structs.replace(
        whole,
        num_heads=len(share.queries),
        num_kv_heads=len(share.queries if whole.latent else share.keys),
        recurrent=recurrent,
    )
    if whole.qk_norm == "projection":
        sizes = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        norm = SharedNorm(sizes, list(share.counted), total)
    source = _HeadSource(checkpoint, whole, share)
    return half.with_heads(spec, Loader(source, half.dtype, half.device, None, 0), norm)
