"""Attention divided by heads among workers (tensor parallelism): the weights of one worker.

    query heads    | 0 1 2 | 3 4 5 |     of worker 0, of worker 1
    KV heads       | 0     | 1     |     those that these queries read: on several workers if needed

Rows of q, k and v, or of q_b and kv_b, and columns of o are divided; latents are on all workers,
and the bias of o is on the first one, so that the sum over workers has everything once.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from contracts.errors import ConfigError
from models.decoder.decoder import AttentionHalf
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint
from models.weights.layout import WeightSpec, attention_tensors
from models.weights.loading import Loader

_QUERY_ROWS = ("q", "q_bias", "gate", "q_b", "kv_b", "sinks")
_KEY_ROWS = ("k", "k_bias", "v", "v_bias")


def check_divisible(spec: ModelSpec, workers: int) -> None:
    """Raise ConfigError if attention cannot be divided among that many workers."""
    mode, reason = "prefill.experts=shuffled", ""
    if spec.recurrent is not None:
        reason = "has recurrent layers"
    elif spec.indexer is not None:
        reason = "has sparse attention"
    elif spec.window_layers is not None:
        reason = "has other KV heads in layers with a window"
    elif spec.qk_norm == "projection":
        reason = "norms the queries of all heads together"
    if reason:
        raise ConfigError(f"{mode}: {spec.architecture} {reason}; use gathered")
    if workers > spec.num_heads:
        raise ConfigError(
            f"groups.prefill_ranks={workers} with {mode}: more than the {spec.num_heads} attention "
            "heads; start fewer, or use gathered"
        )


class HeadShare(NamedTuple):
    """Heads of a worker. keys: KV heads that its queries read, one per group of equal size.

    With groups of different sizes each query has a KV head of its own, so that one may repeat.
    """

    worker: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def part(self, role: str, whole: Tensor, spec: ModelSpec) -> Tensor:
        """Return this worker's part of an attention tensor."""
        if role == "o_bias" and self.worker > 0:
            return torch.zeros_like(whole)
        if role == "o":
            return _heads_of(whole.T, spec.num_heads, self.queries).T
        if role in _QUERY_ROWS:
            return _heads_of(whole, spec.num_heads, self.queries)
        if role in _KEY_ROWS:
            return _heads_of(whole, spec.num_kv_heads, self.keys)
        return whole


def _heads_of(rows: Tensor, heads: int, chosen: tuple[int, ...]) -> Tensor:
    return rows.reshape(heads, -1, *rows.shape[1:])[list(chosen)].flatten(0, 1)


def head_share(spec: ModelSpec, worker: int, workers: int) -> HeadShare:
    """Return the heads of a worker: near-equal runs of query heads."""
    first, last = (spec.num_heads * each // workers for each in (worker, worker + 1))
    queries, group = tuple(range(first, last)), spec.num_heads // spec.num_kv_heads
    keys = tuple(query // group for query in queries)
    counts = {keys.count(key) for key in keys}
    return HeadShare(worker, queries, tuple(dict.fromkeys(keys)) if len(counts) == 1 else keys)


class _HeadSource:
    """A `TensorSource` of one worker's attention."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, share: HeadShare) -> None:
        self._checkpoint, self._spec, self._share = checkpoint, spec, share
        self._whole = {
            weight_spec.names: (role, weight_spec)
            for layer in range(spec.num_layers)
            for role, weight_spec in attention_tensors(spec, layer).items()
        }

    def load(self, weight_spec: WeightSpec) -> Tensor:
        role, whole = self._whole[weight_spec.names]
        return self._share.part(role, self._checkpoint.load(whole), self._spec)

    def release(self) -> None:
        self._checkpoint.release()


def divided_half(half: AttentionHalf, checkpoint: Checkpoint, share: HeadShare) -> AttentionHalf:
    """Return a half with the attention of these heads, which shares all other weights.

    Raises CheckpointError.
    """
    spec = msgspec.structs.replace(
        half.spec,
        num_heads=len(share.queries),
        num_kv_heads=len(share.queries if half.spec.latent else share.keys),
    )
    source = _HeadSource(checkpoint, half.spec, share)
    return half.with_heads(spec, Loader(source, half.dtype, half.device, None, 0))
