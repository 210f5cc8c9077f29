"""Cached entries and states of a batch that prefill workers compute together.

The leader keeps K and V of all heads, latents and recurrent states in its own pool, so that each
batch can run either way. Other workers get what a batch reads of it layer by layer, and keep
nothing.

Shapes: T tokens of a batch, C rows of a pool that are read, N new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.gather.group_exchange import GroupExchange
from kernels.steps import Steps
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.decoder.divided_heads import HeadShare
from models.experts.expert_half import ExpertHalf
from planner.arrays import Ints


class GroupHalf(NamedTuple):
    """A worker's half with its heads, and the heads of all workers.

    slices: this worker's part of every expert, read at the first call.
    """

    half: AttentionHalf
    shares: tuple[HeadShare, ...]
    block_tokens: int
    slices: Callable[[], ExpertHalf]


class Numbering(NamedTuple):
    """Former numbers of the blocks and the slots of states, by their numbers from 0."""

    blocks: Ints
    states: Ints


class OuterPool(NamedTuple):
    """The leader's own pool and batch, and its numbers of those of the call."""

    kv: KvPool
    batch: AttentionBatch
    numbering: Numbering


def numbered_slices(slices: Sequence[SequenceSlice]) -> tuple[list[SequenceSlice], Numbering]:
    """Return slices with blocks and slots of states numbered from 0."""
    blocks, states = dict[int, int](), dict[int, int]()

    def block(former: int) -> int:
        return blocks.setdefault(former, len(blocks))

    def slot(former: int) -> int:
        return states.setdefault(former, len(states))

    def numbered(each: SequenceSlice) -> SequenceSlice:
        state = each.state
        if state is not None:
            source = None if state.source is None else slot(state.source)
            saves = tuple((position, slot(to)) for position, to in state.saves)
            state = state._replace(slot=slot(state.slot), source=source, saves=saves)
        return dataclasses.replace(
            each,
            token_ids=list(each.token_ids),
            block_table=[block(former) for former in each.block_table],
            copies=[
                copy._replace(source=block(copy.source), block=block(copy.block))
                for copy in each.copies
            ],
            state=state,
        )

    found = [numbered(each) for each in slices]
    return found, Numbering(np.array(list(blocks), np.int64), np.array(list(states), np.int64))


class SharedCache:
    """One worker's entries and states of a pass. outer: the leader's pool; None on the others.

    `kv` has one layer: `load` comes before a layer's attention, `new_entries` and `keep` after it.
    """

    def __init__(
        self,
        exchange: GroupExchange,
        group: GroupHalf,
        batch: AttentionBatch,
        leader: int,
        outer: OuterPool | None,
    ) -> None:
        half, states = group.half, [each for each in batch.states if each is not None]
        self._exchange, self._group, self._spec = exchange, group, half.spec
        self._leader, self._outer = leader, outer
        self._changed: list[tuple[int, list[Tensor]]] = []
        written_C, read_C = _written_slots(batch), _read_slots(batch)
        self._tokens = _Rows(np.setdiff1d(read_C, written_C), batch.slots_T.numpy())
        new = {each.slot for each in states} | {to for each in states for _, to in each.saves}
        read = {each.source for each in states if each.source is not None}
        self._states = _Rows(np.array([*read], np.int64), np.array([*new], np.int64))
        self.kv = KvPool(
            half.spec,
            1 + int(np.concatenate([read_C, written_C]).max()) // group.block_tokens,
            group.block_tokens,
            half.dtype,
            half.device,
            one_layer=True,
            num_states=1 + max(new | read, default=-1),
        )

    def load(self, layer: int) -> Steps[None]:
        """Copy cached entries or states of this worker's heads from the leader's pool."""
        read_C, exchange = self._rows(layer).read, self._exchange
        if not len(read_C):
            return
        pools = self.kv.entries(layer)
        if self._outer is None:
            packet = yield from exchange.receive_context(layer, exchange.names[self._leader])
            for pool, held in zip(pools, packet.tensors, strict=True):
                pool[read_C] = held
            packet.release()
            return
        outer_C = self._outer_rows(layer, read_C, self._outer)
        held_C = [pool[outer_C] for pool in self._outer.kv.entries(layer)]
        for share, name in zip(self._group.shares, exchange.names, strict=True):
            heads = self._heads(layer, share)
            entries = [held[:, list(each)] for held, each in zip(held_C, heads, strict=True)]
            if share.worker != exchange.rank:
                exchange.send_context(layer, name, entries)
                continue
            for pool, held in zip(pools, entries, strict=True):
                pool[read_C] = held

    def new_entries(self, layer: int) -> list[Tensor]:
        """Return new entries or states of heads that this worker provides to the leader."""
        new_N, provided = _span(self._rows(layer).new), self._provided(layer, self._exchange.rank)
        pools = zip(self.kv.entries(layer), provided, strict=True)
        return [pool[new_N][:, _span([local for local, _ in heads])] for pool, heads in pools]

    def keep(self, layer: int, every: Sequence[Sequence[Tensor]]) -> None:
        """Write new entries of all workers to the leader's pool; states when the pass has ended.

        A layer that loses a worker is computed again, from the states before it.
        """
        if self._outer is None:
            return
        new_N, whole = self._rows(layer).new, list[Tensor]()
        provided = [self._provided(layer, worker) for worker in range(len(every))]
        for number, pool in enumerate(self._outer.kv.entries(layer)):
            entry = pool.new_empty((len(new_N), *pool.shape[1:]))
            for heads, parts in zip(provided, every, strict=True):
                if heads[number]:
                    entry[:, _span([head for _, head in heads[number]])] = parts[number]
            whole.append(entry)
        if layer in self._spec.recurrent_layers:
            self._changed.append((layer, whole))
        else:
            self._outer.kv.write(layer, self._outer.batch, *whole)

    def finish(self, layers: int) -> None:
        """Write the states of the first layers, when the pass has ended."""
        for layer, whole in self._changed:
            if layer >= layers:
                break
            assert self._outer is not None
            slots_N = self._outer_rows(layer, self._states.new, self._outer)
            for pool, entry in zip(self._outer.kv.entries(layer), whole, strict=True):
                pool[slots_N] = entry

    def _rows(self, layer: int) -> _Rows:
        return self._states if layer in self._spec.recurrent_layers else self._tokens

    def _outer_rows(self, layer: int, rows: Ints, outer: OuterPool) -> Tensor:
        if layer in self._spec.recurrent_layers:
            return torch.from_numpy(outer.numbering.states[rows])
        size = self._group.block_tokens
        return torch.from_numpy(outer.numbering.blocks[rows // size] * size + rows % size)

    def _heads(self, layer: int, share: HeadShare) -> list[tuple[int, ...]]:
        """Return the heads of a worker's pool, for each entry of a layer."""
        entries, sizes = len(self.kv.entries(layer)), self._spec.recurrent
        if sizes is not None and layer in sizes.layers:
            each = sizes.heads_per_key
            values = tuple(key * each + n for key in share.key_heads for n in range(each))
            return [share.key_heads, values]
        return [(0,) if self._spec.latent is not None else share.keys] * entries

    def _provided(self, layer: int, worker: int) -> list[list[tuple[int, int]]]:
        """Return (head in the worker's pool, head) of what it sends to the leader, by entry."""
        shares, leader = self._group.shares, self._leader
        held = self._heads(layer, shares[worker])
        if layer in self._spec.recurrent_layers:
            return [list(enumerate(heads)) for heads in held]
        if self._spec.latent is not None:
            return [[(0, 0)] if worker == leader else []] * len(held)
        first = [leader, *(w for w in range(len(shares)) if w != leader)]
        taken: dict[int, int] = {}
        for each in first:
            for key in shares[each].keys:
                taken.setdefault(key, each)
        keys = shares[worker].keys
        provided = [(keys.index(key), key) for key, each in taken.items() if each == worker]
        return [provided] * len(held)


class _Rows(NamedTuple):
    """Rows of the pass's pool that a layer reads of earlier batches, and that it writes."""

    read: Ints
    new: Ints


def _span(numbers: Ints | list[int]) -> slice | Ints | list[int]:
    """Return consecutive numbers as a slice, which indexes without a copy."""
    first = int(numbers[0]) if len(numbers) else 0
    found = slice(first, first + len(numbers))
    return found if np.array_equal(numbers, np.arange(found.start, found.stop)) else numbers


def _read_slots(batch: AttentionBatch) -> Ints:
    """Return the slots of tokens before the batch, and those that it copies."""
    read = [_slots(each.slots_S)[: each.start] for each in batch.sequences]
    return np.concatenate(read if batch.copies is None else [*read, batch.copies.from_C.numpy()])


def _written_slots(batch: AttentionBatch) -> Ints:
    slots_T: Ints = batch.slots_T.numpy()
    return slots_T if batch.copies is None else np.append(slots_T, batch.copies.to_C.numpy())


def _slots(slots_S: slice | Tensor) -> Ints:
    if isinstance(slots_S, slice):
        return np.arange(slots_S.start, slots_S.stop)
    found: Ints = slots_S.numpy()
    return found
