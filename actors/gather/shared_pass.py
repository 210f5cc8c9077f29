"""One worker's side of a batch that all prefill workers compute together (Speculative MoE, s-TS).

    worker 0   heads 0 1 2, all tokens ─┐ reduce- ┌─ its tokens: experts by all-to-all ─┐ all-
    worker 1   heads 3 4 5, all tokens ─┘ scatter └─ its tokens                        ─┘ gather

    tensor_parallel: all-gather before the experts, of which each worker has a part for all tokens,
    and a reduce-scatter after them

A token lands on the worker that holds most of its predicted experts, in shards of equal size. The
next layer's router, applied to the residual before its attention, predicts; counts of pairs by
worker travel with the all-gather, so that all workers compute the same order. Sums are added in the
order of ranks.

Shapes: T tokens of a batch, R rows of a layer (T, or the last ones), U of a worker, D model dim,
W workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.channels.base import PacketKind
from actors.gather.group_exchange import GroupCall, GroupExchange
from actors.gather.shared_cache import GroupHalf, OuterPool, SharedCache
from kernels.experts import local_index
from kernels.fused_ops import write_slots
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch, LastRows
from models.experts.expert_half import expert_sum_steps
from planner.arrays import Ints
from planner.placement.nodes import LinkLevels
from planner.placement.shuffling import shard_bounds, shuffled_order
from planner.schedule.batch_choice import ExchangeScheme


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
        self._exchange, self._half, self._call, self._leader = exchange, half, call, leader
        self._slices, experts = group.slices, half.spec.num_experts
        self._every_E = local_index(list(range(experts)), experts)
        self._names = exchange.names
        self._batch = AttentionBatch.build(
            slices, block_tokens=group.block_tokens, device=half.device
        )
        self._last: LastRows | None = None
        if call.counts is not None:
            self._last = self._batch.last(call.counts)
        self._cache = SharedCache(exchange, group, self._batch, leader, outer)
        self._pairs_TW: Ints | None = None  # predicted, of the next layer
        self.hidden_TD: Tensor  # set before the first layer
        self.layers = half.spec.num_layers

    def steps(self, layer: int, hidden_TD: Tensor | None = None) -> Steps[Tensor]:
        """Compute a layer and return the residual of all its rows.

        hidden_TD: the leader's residual of the layer before the pass. Raises PeerError, also
        between two steps if a worker has left.
        """
        if hidden_TD is not None:
            self.hidden_TD = hidden_TD
        steps, self._exchange.layer = self._steps(layer), layer
        while True:
            try:
                next(steps)
            except StopIteration:
                return self.hidden_TD
            self._exchange.check()
            yield

    def _steps(self, layer: int) -> Steps[None]:
        half, exchange = self._half, self._exchange
        if layer == self._call.layer:
            yield from self._begin()
        last = self._last if layer == self.layers - 1 else None
        yield from self._cache.load(layer)
        partial_RD = yield from half.partial_steps(
            layer, self.hidden_TD, self._batch, self._cache.kv, last
        )
        rows_TD = self.hidden_TD
        if last is not None:
            rows_TD = rows_TD.index_select(0, last.rows_R)
        order_R = torch.from_numpy(self._order(layer, last))
        bounds = shard_bounds(len(order_R), exchange.workers)
        shards = [order_R[bounds[w] : bounds[w + 1]] for w in range(exchange.workers)]
        entries = self._cache.new_entries(layer) if self._call.keeps_kv else []
        sum_UD = yield from self._reduce(layer, partial_RD, shards, entries)
        if self._call.scheme is ExchangeScheme.ALL_REDUCE:
            every_RD = yield from self._gather(layer, sum_UD, shards)
            sum_UD = every_RD[shards[exchange.rank]]
        yield
        residual_UD = rows_TD.index_select(0, shards[exchange.rank])
        own_UD = half.add_attention(layer, residual_UD, sum_UD)
        if self._call.scheme is ExchangeScheme.TENSOR_PARALLEL and half.router(layer) is not None:
            own_UD = yield from self._sliced_experts(layer, own_UD, shards)
        else:
            own_UD = yield from self._feed_forward(layer, own_UD)
        pairs_UW = self._predict(layer + 1, own_UD)
        self.hidden_TD = yield from self._gather(layer, own_UD, shards, pairs_UW)

    def _begin(self) -> Steps[None]:
        """Embed the tokens, or take the leader's residual before a later first layer."""
        if not self._call.layer:
            self.hidden_TD = self._half.embed(self._batch)
            return
        exchange, before = self._exchange, self._call.layer - 1
        leader = exchange.names[self._leader]
        if exchange.rank != self._leader:
            packet = yield from exchange.receive_context(before, leader)
            self.hidden_TD = packet.tensors[0].clone()
            packet.release()
            return
        for peer in exchange.names:
            if peer != leader:
                exchange.send_context(before, peer, [self.hidden_TD])

    def finish(self, layers: int) -> None:
        """End the pass of the leader, of which all workers have computed the first layers."""
        self._cache.finish(layers)

    def _feed_forward(self, layer: int, own_UD: Tensor) -> Steps[Tensor]:
        half = self._half
        if not len(own_UD):
            if half.router(layer) is not None:
                yield from self._exchange.participate(layer, own_UD)
            return own_UD
        out = yield from half.mlp_steps(layer, own_UD, self._batch)
        hidden_UD, routed = out.hidden_TD, out.routed
        if routed is None:
            return (yield from half.residual(hidden_UD, self._batch))
        hidden_UD.add_((yield from self._exchange.sums(layer, routed)))
        return (yield from self._joined(layer, hidden_UD, routed.router_input))

    def _sliced_experts(
        self, layer: int, own_UD: Tensor, shards: Sequence[Tensor]
    ) -> Steps[Tensor]:
        """Compute this worker's part of the experts of all rows; return its own rows."""
        own_U = shards[self._exchange.rank]
        every_RD = yield from self._gather(layer, own_UD, shards)
        out = yield from self._half.mlp_steps(layer, every_RD, self._batch)
        assert out.routed is not None
        held = self._slices().layer_experts(layer)
        partial_RD = yield from expert_sum_steps(out.routed, held, self._every_E)
        sum_UD = yield from self._reduce(layer, partial_RD.to(own_UD.dtype), shards)
        if self._batch.unjoined is not None:
            residual_RD, norm_D = self._batch.unjoined
            self._batch.unjoined = residual_RD.index_select(0, own_U), norm_D
        hidden_UD = out.hidden_TD.index_select(0, own_U).add_(sum_UD)
        x_UD = out.routed.router_input.index_select(0, own_U)
        return (yield from self._joined(layer, hidden_UD, x_UD))

    def _joined(self, layer: int, hidden_UD: Tensor, x_UD: Tensor) -> Steps[Tensor]:
        """Add shared experts and return the residual."""
        shared_UD = yield from self._half.shared_steps(layer, x_UD)
        if shared_UD is not None:
            hidden_UD.add_(shared_UD)
        return (yield from self._half.residual(hidden_UD, self._batch))

    # --- order of the rows

    def _order(self, layer: int, last: LastRows | None) -> Ints:
        """Return the rows in the order of their workers. Equal on all workers."""
        pairs_TW, self._pairs_TW = self._pairs_TW, None
        if self._call.scheme is ExchangeScheme.SHUFFLED and pairs_TW is not None:
            if last is not None:
                pairs_TW = pairs_TW[last.rows_R.numpy()]
            levels = LinkLevels(tuple(self._call.nodes))
            return shuffled_order(levels.landing_values(pairs_TW.astype(np.float64)))
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
        holds_EW = self._exchange.placement.layer(layer).held(self._half.spec.num_experts)
        pairs_UW: Tensor = torch.from_numpy(holds_EW)[ids_UK].sum(1, dtype=torch.uint8)
        return pairs_UW

    # --- collectives

    def _reduce(
        self,
        layer: int,
        partial_RD: Tensor,
        shards: Sequence[Tensor],
        entries: Sequence[Tensor] = (),
    ) -> Steps[Tensor]:
        """Return the sum over workers of this worker's rows. entries: new ones, for the leader."""
        exchange, parts = self._exchange, dict[str, list[Tensor]]()
        for worker, name in enumerate(self._names):
            parts[name] = [partial_RD.index_select(0, shards[worker])]
            if worker == self._leader:
                parts[name] += entries
        own = parts[self._names[exchange.rank]]
        packets = yield from exchange.collect(PacketKind.SCATTER, layer, parts)
        arrived = {name: packet.tensors for name, packet in packets.items()}
        every = [arrived.get(name, own) for name in self._names]
        sum_UD = every[0][0].float()
        for other in every[1:]:
            sum_UD = sum_UD + other[0]
        if entries:
            self._cache.keep(layer, [tensors[1:] for tensors in every])
        for packet in packets.values():
            packet.release()
        return sum_UD.to(partial_RD.dtype)

    def _gather(
        self, layer: int, own_UD: Tensor, shards: Sequence[Tensor], pairs_UW: Tensor | None = None
    ) -> Steps[Tensor]:
        """Return the rows of all workers in their order, and keep predictions."""
        exchange, own = self._exchange, [own_UD]
        if pairs_UW is not None:
            own.append(pairs_UW)
        kind = PacketKind.GATHER
        packets = yield from exchange.collect(kind, layer, dict.fromkeys(self._names, own))
        rows = sum(map(len, shards))
        out_RD = own_UD.new_empty((rows, own_UD.shape[1]))
        pairs_RW = torch.zeros((rows, exchange.workers), dtype=torch.uint8)
        for name, shard in zip(self._names, shards, strict=True):
            tensors = packets[name].tensors if name in packets else own
            write_slots(out_RD.unsqueeze(1), shard, tensors[0].unsqueeze(1))
            if pairs_UW is not None:
                pairs_RW[shard] = tensors[1]
        for packet in packets.values():
            packet.release()
        self._pairs_TW = None if pairs_UW is None else pairs_RW.numpy()
        return out_RD
