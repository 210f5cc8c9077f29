"""One worker's side of a batch that all prefill workers compute together (Speculative MoE, s-TS).

    worker 0   heads 0 1 2, all tokens ─┐ reduce- ┌─ its tokens: experts by all-to-all ─┐ all-
    worker 1   heads 3 4 5, all tokens ─┘ scatter └─ its tokens                        ─┘ gather

A token lands on the worker that holds most of its predicted experts, in shards of equal size. The
next layer's router, applied to the residual before its attention, predicts; counts of pairs by
worker travel with the all-gather, so that all workers compute the same order. Sums are added in the
order of ranks.

The leader keeps K and V of all heads in its own pool, so that each batch can run either way. Other
workers get what a batch reads of it layer by layer, and keep nothing.

Shapes: T tokens of a batch, R rows of a layer (T, or the last ones), U of a worker, D model dim,
W workers, C cached entries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.channels.base import PacketKind
from actors.gather.group_exchange import GroupCall, GroupExchange
from kernels.steps import Steps
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, LastRows, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.divided_heads import HeadShare
from planner.arrays import Ints
from planner.costs.exchange_volume import ExchangeScheme
from planner.placement.shuffling import shard_bounds, shuffled_order


class OuterPool(NamedTuple):
    """The leader's own pool and batch. blocks: the pool's block of each block of the call."""

    kv: KvPool
    batch: AttentionBatch
    blocks: Ints


def numbered_slices(slices: Sequence[SequenceSlice]) -> tuple[list[SequenceSlice], Ints]:
    """Return slices with blocks numbered from 0, and the former block of each."""
    number: dict[int, int] = {}

    def numbered(block: int) -> int:
        return number.setdefault(block, len(number))

    found = [
        dataclasses.replace(
            each,
            token_ids=list(each.token_ids),
            block_table=[numbered(block) for block in each.block_table],
            copies=[
                copy._replace(source=numbered(copy.source), block=numbered(copy.block))
                for copy in each.copies
            ],
        )
        for each in slices
    ]
    return found, np.array(list(number), np.int64)


class GroupHalf(NamedTuple):
    """A worker's half with its heads, and the heads of all workers."""

    half: AttentionHalf
    shares: tuple[HeadShare, ...]
    block_tokens: int


class SharedPass:
    """One worker's side of a pass. outer: the leader's pool; None on the others, or if not kept."""

    def __init__(
        self,
        exchange: GroupExchange,
        group: GroupHalf,
        call: GroupCall,
        leader: int,
        outer: OuterPool | None = None,
    ) -> None:
        half, slices = group.half, call.slices
        self._exchange, self._half, self._group, self._call = exchange, half, group, call
        self._leader, self._outer = leader, outer
        self._names = exchange.names
        self._batch = AttentionBatch.build(
            slices, block_tokens=group.block_tokens, device=half.device
        )
        self._last: LastRows | None = None
        if call.counts is not None:
            self._last = self._batch.last(call.counts)
        blocks = 1 + max(block for each in slices for block in _blocks_of(each))
        self._kv = KvPool(
            half.spec, blocks, group.block_tokens, half.dtype, half.device, one_layer=True
        )
        self._context = _context_slots(self._batch)
        self._pairs_TW: Ints | None = None  # predicted, of the next layer
        self.hidden_TD = half.embed(self._batch)
        self.layers = half.spec.num_layers

    def steps(self, layer: int) -> Steps[Tensor]:
        """Compute a layer and return the residual of all its rows. Raises PeerError."""
        half, exchange = self._half, self._exchange
        last = self._last if layer == self.layers - 1 else None
        self._load_context(layer)
        partial_RD = yield from half.partial_steps(
            layer, self.hidden_TD, self._batch, self._kv, last
        )
        if last is not None:
            self.hidden_TD = self.hidden_TD.index_select(0, last.rows_R)
        order_R = torch.from_numpy(self._order(layer, last))
        bounds = shard_bounds(len(order_R), exchange.workers)
        shards = [order_R[bounds[w] : bounds[w + 1]] for w in range(exchange.workers)]
        sum_UD = self._reduce(layer, partial_RD, shards)
        if self._call.scheme is ExchangeScheme.ALL_REDUCE:
            sum_UD = self._gather(layer, sum_UD, shards)[shards[exchange.rank]]
        yield
        own_UD = half.add_attention(layer, self.hidden_TD[shards[exchange.rank]], sum_UD)
        own_UD = yield from self._feed_forward(layer, own_UD)
        pairs_UW = self._predict(layer + 1, own_UD)
        self.hidden_TD = self._gather(layer, own_UD, shards, pairs_UW)
        return self.hidden_TD

    def _feed_forward(self, layer: int, own_UD: Tensor) -> Steps[Tensor]:
        half = self._half
        if not len(own_UD):
            if half.router(layer) is not None:
                self._exchange.participate(layer, own_UD)
            return own_UD
        out = yield from half.mlp_steps(layer, own_UD, self._batch)
        hidden_UD, routed = out.hidden_TD, out.routed
        if routed is not None:
            hidden_UD.add_(self._exchange.sums(layer, routed))
            shared_UD = yield from half.shared_steps(layer, routed.router_input)
            if shared_UD is not None:
                hidden_UD.add_(shared_UD)
        return (yield from half.residual(hidden_UD, self._batch))

    # --- order of the rows

    def _order(self, layer: int, last: LastRows | None) -> Ints:
        """Return the rows in the order of their workers. Equal on all workers."""
        pairs_TW, self._pairs_TW = self._pairs_TW, None
        if self._call.scheme is ExchangeScheme.SHUFFLED and pairs_TW is not None:
            if last is not None:
                pairs_TW = pairs_TW[last.rows_R.numpy()]
            return shuffled_order(pairs_TW.astype(np.float64))
        rows = self._batch.num_tokens if last is None else len(last.rows_R)
        is_first = last is None and layer == self._half.spec.moe_layers[0]
        if is_first and self._call.first_order:
            return np.frombuffer(self._call.first_order, np.int32).astype(np.int64)
        return np.arange(rows)

    def _predict(self, layer: int, own_UD: Tensor) -> Tensor | None:
        """Return the predicted pairs of a layer on each worker, uint8 [U, W]; None: no prediction.

        The layer's router is applied to the residual before its attention.
        """
        if self._call.scheme is not ExchangeScheme.SHUFFLED or layer == self.layers:
            return None
        router = self._half.router(layer)
        if router is None:
            return None
        workers = self._exchange.workers
        if not len(own_UD):
            return torch.zeros((0, workers), dtype=torch.uint8)
        ids_UK = router(self._half.mlp_input(layer, own_UD)).topk_ids_TK
        holds_EW = self._exchange.placed(layer).held(self._half.spec.num_experts)
        pairs_UW: Tensor = torch.from_numpy(holds_EW)[ids_UK].sum(1, dtype=torch.uint8)
        return pairs_UW

    # --- collectives

    def _reduce(self, layer: int, partial_RD: Tensor, shards: Sequence[Tensor]) -> Tensor:
        """Return the sum over workers of this worker's rows; the leader takes new entries."""
        exchange, parts = self._exchange, dict[str, Sequence[Tensor]]()
        for worker, name in enumerate(self._names):
            entries = self._new_entries(layer) if worker == self._leader else []
            parts[name] = [partial_RD[shards[worker]], *entries]
        own = parts[self._names[exchange.rank]]
        packets = exchange.collect(PacketKind.SCATTER, layer, parts)
        arrived = {name: packet.tensors for name, packet in packets.items()}
        every = [arrived.get(name, own) for name in self._names]
        sum_UD = every[0][0].float()
        for other in every[1:]:
            sum_UD = sum_UD + other[0]
        if self._outer is not None:
            self._keep(layer, [entries[1:] for entries in every], self._outer)
        for packet in packets.values():
            packet.release()
        return sum_UD.to(partial_RD.dtype)

    def _gather(
        self,
        layer: int,
        own_UD: Tensor,
        shards: Sequence[Tensor],
        pairs_UW: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of all workers in their order, and keep predictions."""
        exchange, own = self._exchange, [own_UD]
        if pairs_UW is not None:
            own.append(pairs_UW)
        kind = PacketKind.GATHER
        packets = exchange.collect(kind, layer, dict.fromkeys(self._names, own))
        rows = sum(map(len, shards))
        out_RD = own_UD.new_empty((rows, own_UD.shape[1]))
        pairs_RW = torch.zeros((rows, exchange.workers), dtype=torch.uint8)
        for name, shard in zip(self._names, shards, strict=True):
            tensors = packets[name].tensors if name in packets else own
            out_RD[shard] = tensors[0]
            if pairs_UW is not None:
                pairs_RW[shard] = tensors[1]
        for packet in packets.values():
            packet.release()
        self._pairs_TW = None if pairs_UW is None else pairs_RW.numpy()
        return out_RD

    # --- entries of the KV cache

    def _new_entries(self, layer: int) -> list[Tensor]:
        """Return the new tokens' entries of heads that this worker provides to the leader."""
        if not self._call.keeps_kv:
            return []
        slots_T = self._batch.slots_T
        heads = [local for local, _ in self._provided(self._exchange.rank)]
        return [pool[slots_T][:, heads] for pool in self._kv.entries(layer)]

    def _provided(self, worker: int) -> list[tuple[int, int]]:
        """Return (head in the worker's pool, head) of the entries that it sends to the leader."""
        if self._half.spec.latent is not None:
            return [(0, 0)] if worker == self._leader else []
        shares, leader = self._group.shares, self._leader
        first = [leader, *(w for w in range(len(shares)) if w != leader)]
        taken: dict[int, int] = {}
        for each in first:
            for key in shares[each].keys:
                taken.setdefault(key, each)
        keys = shares[worker].keys
        return [(keys.index(key), key) for key, each in taken.items() if each == worker]

    def _keep(self, layer: int, every: Sequence[Sequence[Tensor]], outer: OuterPool) -> None:
        """Write the new entries of all heads to the leader's pool."""
        provided = [[key for _, key in self._provided(w)] for w in range(len(every))]
        whole = []
        for number, pool in enumerate(outer.kv.entries(layer)):
            entry = pool.new_empty((self._batch.num_tokens, *pool.shape[1:]))
            for heads, parts in zip(provided, every, strict=True):
                if heads:
                    entry[:, heads] = parts[number]
            whole.append(entry)
        outer.kv.write(layer, outer.batch, *whole)

    def _load_context(self, layer: int) -> None:
        """Copy cached entries of this worker's heads from the leader's pool."""
        slots_C, exchange = self._context, self._exchange
        if not len(slots_C):
            return
        if self._outer is None:
            packet = exchange.receive_context(layer, self._names[self._leader])
            for pool, held in zip(self._kv.entries(layer), packet.tensors, strict=True):
                pool[slots_C] = held
            packet.release()
            return
        size = self._group.block_tokens
        outer_C = torch.from_numpy(self._outer.blocks[slots_C // size] * size + slots_C % size)
        held_C = [pool[outer_C] for pool in self._outer.kv.entries(layer)]
        for share, name in zip(self._group.shares, self._names, strict=True):
            heads = [0] if self._half.spec.latent is not None else list(share.keys)
            entries = [held[:, heads] for held in held_C]
            if share.worker != exchange.rank:
                exchange.send_context(layer, name, entries)
                continue
            for pool, held in zip(self._kv.entries(layer), entries, strict=True):
                pool[slots_C] = held


def _blocks_of(piece: SequenceSlice) -> Iterable[int]:
    copied = itertools.chain.from_iterable((copy.source, copy.block) for copy in piece.copies)
    return itertools.chain(piece.block_table, copied)


def _context_slots(batch: AttentionBatch) -> Ints:
    """Return the slots that a batch reads and does not write, ascending."""
    read = [_slots(each.slots_S)[: each.start] for each in batch.sequences]
    written = [batch.slots_T.numpy()]
    if batch.copies is not None:
        read.append(batch.copies.from_C.numpy())
        written.append(batch.copies.to_C.numpy())
    return np.setdiff1d(np.concatenate(read), np.concatenate(written))


def _slots(slots_S: slice | Tensor) -> Ints:
    if isinstance(slots_S, slice):
        return np.arange(slots_S.start, slots_S.stop)
    found: Ints = slots_S.numpy()
    return found
