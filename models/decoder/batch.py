"""A micro-batch of an attention rank: tensors that are made once and used at every layer.

    block_table  [ 7 | 2 | 9 ]        blocks of 4 slots, start = 5, two new tokens
    positions      0 1 2 3 | 4 5 6
    slots         28..31   | 8 9 10   the new tokens' K and V go to slots 9 and 10
                  '-- cached --' ^ ^

Shapes: T new tokens of all sequences, B sequences, S context of one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import AttentionPlan
from kernels.attention_ops import CompiledRows, Keys, SequenceRows
from kernels.device import runs_on_device, upload
from kernels.pages import Pages
from models.spec.layer_spec import RopeSpec


class StateRun(NamedTuple):
    """Recurrent states of a slice: they start as those in `source` (None: zeros), end in `slot`.

    saves: (position, slot) in order: slots for copies of the states after the tokens before it.

        tokens      0 ........ 32 ........ 64 ..... 70       a slice [32, 70) of a prompt
        source      '-- slot 7 --'                           a checkpoint of an earlier prompt
        slot                    3 ──────────────────> 3      changes token by token
        saves                               5                a new checkpoint: (64, 5)
    """

    slot: int
    source: int | None = None
    saves: tuple[tuple[int, int], ...] = ()

    def cut(self, start: int, stop: int, *, is_first: bool) -> StateRun:
        """Return the run of the tokens [start, stop) of the slice."""
        saves = tuple(save for save in self.saves if start < save[0] <= stop)
        return StateRun(self.slot, self.source if is_first else self.slot, saves)


class RecurrenceCall(NamedTuple):
    """Rows that are computed at once: int64 [n, 3], first row, rows, slot. saves: (from, to)."""

    runs: NDArray[np.int64]
    saves: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Calls of a layer, in order.

    starts: slots that are set first, each from another one (None: to zeros). temporary: number of
    slots that only this batch has; they are -1, -2 ...
    """

    starts: tuple[tuple[int, int | None], ...]
    calls: tuple[RecurrenceCall, ...]
    temporary: int


class BlockCopy(NamedTuple):
    """Copy of K and V at offsets first .. last-1 of `source` to the same offsets of `block`."""

    source: int
    block: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceSlice:
    """New tokens of a sequence; block_table has positions 0..start-1 (cached or of this pass).

    state: None if no layer has states, or if they start and end with this slice.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    copies: Sequence[BlockCopy] = ()
    state: StateRun | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlotCopies:
    """Disjoint pool slots from_C and to_C, int64, copied at every layer after `KvPool.write`."""

    from_C: Tensor
    to_C: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Cos and sin per rope, and an attention plan per window, from `AttentionHalf.prepare`.

    angles: None: of layers without rope, 1 and 0. query_scale_T11: these layers' factor of queries.
    recurrence: of layers with states. sparse: rows that see more tokens than an indexer selects.
    """

    angles: dict[RopeSpec | None, tuple[Tensor, Tensor]]
    plans: dict[int | None, AttentionPlan]
    query_scale_T11: Tensor | None = None
    recurrence: RecurrencePlan | None = None
    sparse: CompiledRows | None = None

    def query_factors(self, rope: RopeSpec | None) -> int:
        """Return the address of the factors of a layer's queries, or 0."""
        scale_T11 = self.query_scale_T11
        return 0 if rope is not None or scale_T11 is None else scale_T11.data_ptr()


class HostRows(NamedTuple):
    """Numbers of a batch on a device: positions and slots of rows, block tables [B, W]."""

    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    tables_BW: NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """A batch's tensors: token_ids_T, positions_T, slots_T int64.

    `metadata` is set by the half that runs the batch, and `unjoined` between layers if the MLP's
    output is normed: the residual to which that is still to be added, and its norm. states: of each
    sequence. pages: block tables of the sequences, on a device. host: its numbers, there.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sequences: tuple[SequenceRows, ...]
    copies: SlotCopies | None = None
    metadata: AttentionMetadata | None = None
    unjoined: tuple[Tensor, Tensor] | None = None
    states: tuple[StateRun | None, ...] = ()
    selection: tuple[NDArray[np.int64], Tensor] | None = None
    pages: Pages | None = None
    host: HostRows | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def last(self, counts: Sequence[int]) -> LastRows:
        """Return the last counts[i] rows of each sequence i (not 0 for all)."""
        sequences, rows, first = [], [], 0
        for seq, count in zip(self.sequences, counts, strict=True):
            stop = seq.first + seq.count
            start = seq.context - count
            sequences.append(SequenceRows(first, count, start, seq.slots_S))
            rows.append(np.arange(stop - count, stop))
            first += count
        (rows_R,) = upload([_concatenated(rows)], self.token_ids_T.device)
        batch = AttentionBatch(
            token_ids_T=self.token_ids_T[rows_R],
            positions_T=self.positions_T[rows_R],
            slots_T=self.slots_T[rows_R],
            sequences=tuple(sequences),
            pages=self.pages,
        )
        return LastRows(rows_R, batch)

    @staticmethod
    def build(
        slices: Sequence[SequenceSlice], *, block_tokens: int, device: torch.device | str = "cpu"
    ) -> AttentionBatch:
        """Build the batch. Raises ValueError for an empty slice or a short block table."""
        device = torch.device(device)
        pages = runs_on_device(device)
        token_ids, sequences, first = list[int](), list[SequenceRows](), 0
        positions, slots = [], []
        for piece in slices:
            token_ids.extend(piece.token_ids)
            count = len(piece.token_ids)
            own, keys = _slots(piece, block_tokens, with_context=not pages)
            positions.append(np.arange(piece.start, piece.start + count))
            slots.append(own)
            sequences.append(SequenceRows(first, count, piece.start, keys))
            first += count
        arrays = [np.array(token_ids, np.int64), _concatenated(positions), _concatenated(slots)]
        copies = any(piece.copies for piece in slices)
        arrays += _slot_copies(slices, block_tokens) if copies else ()
        arrays += [_block_tables(slices)] if pages else []
        host = HostRows(arrays[1], arrays[2], arrays[-1].view(np.int32)) if pages else None
        token_ids_T, positions_T, slots_T, *others = upload(arrays, device)
        return AttentionBatch(
            token_ids_T,
            positions_T,
            slots_T,
            tuple(sequences),
            SlotCopies(*others[:2]) if copies else None,
            states=tuple(piece.state for piece in slices),
            pages=Pages(others[-1].view(torch.int32), block_tokens) if pages else None,
            host=host,
        )


class LastRows(NamedTuple):
    """Rows rows_R of a batch whose hidden states are needed after the last layer.

    At that layer other rows only need K and V. batch: of these rows only, as if the others were
    cached; sequences without such rows are empty.
    """

    rows_R: Tensor
    batch: AttentionBatch

    @property
    def metadata(self) -> AttentionMetadata:
        assert self.batch.metadata is not None
        return self.batch.metadata


def _slots(
    piece: SequenceSlice, block_tokens: int, *, with_context: bool
) -> tuple[NDArray[np.int64], Keys]:
    """Return the pool slots of new tokens, and of the context: a slice if consecutive."""
    context = piece.start + len(piece.token_ids)
    num_blocks = -(-context // block_tokens)
    if not piece.token_ids or piece.start < 0:
        raise ValueError(f"a slice needs tokens and start >= 0, got start={piece.start}")
    if len(piece.block_table) < num_blocks:
        raise ValueError(
            f"block_table has {len(piece.block_table)} blocks of {block_tokens} tokens,"
            f" the context of {context} tokens needs {num_blocks}"
        )
    before = 0 if with_context else piece.start // block_tokens
    blocks = piece.block_table[before:num_blocks]
    if with_context and all(map(operator.eq, blocks, range(blocks[0], blocks[0] + num_blocks))):
        first = blocks[0] * block_tokens
        return np.arange(first + piece.start, first + context), slice(first, first + context)
    firsts = np.asarray(blocks, dtype=np.int64)[:, None] * block_tokens
    slots_S = (firsts + np.arange(block_tokens)).reshape(-1)[: context - before * block_tokens]
    new_T = slots_S[piece.start - before * block_tokens :]
    return new_T, torch.from_numpy(slots_S) if with_context else slice(0, 0)


def _block_tables(slices: Sequence[SequenceSlice]) -> NDArray[np.int64]:
    """Return int32 tables, zeros after each, as [B, W / 2] numbers of 64 bits."""
    longest = max((len(piece.block_table) for piece in slices), default=0)
    tables_BW = np.zeros((len(slices), longest + longest % 2), np.int32)
    for row, piece in zip(tables_BW, slices, strict=True):
        row[: len(piece.block_table)] = piece.block_table
    return tables_BW.view(np.int64)


def _slot_copies(
    slices: Sequence[SequenceSlice], block_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return source and target slots of all copies."""
    sources: list[int] = []
    targets: list[int] = []
    for source, block, first, last in (copy for piece in slices for copy in piece.copies):
        sources += range(source * block_tokens + first, source * block_tokens + last)
        targets += range(block * block_tokens + first, block * block_tokens + last)
    return np.array(sources, np.int64), np.array(targets, np.int64)


def _concatenated(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def plan_recurrence(
    sequences: Sequence[SequenceRows], states: Sequence[StateRun | None], call_rows: int
) -> RecurrencePlan:
    """Cut a batch into calls of about `call_rows` rows, with one run of each sequence.

    Raises ValueError for a slice that continues a sequence without its states.
    """
    starts, temporary = list[tuple[int, int | None]](), 0
    calls, rows = list[RecurrenceCall](), 0
    runs, saves = list[tuple[int, ...]](), list[tuple[int, int]]()
    for seq, state in zip(sequences, states, strict=True):
        if state is None:
            if seq.start:
                raise ValueError(f"a slice from position {seq.start} needs the states before it")
            temporary += 1
            state = StateRun(-temporary)
        if state.source != state.slot:
            starts.append((state.slot, state.source))
        at, saved = seq.start, dict(state.saves)
        while at < seq.context:
            stop = min([seq.context, at + call_rows, *(save for save in saved if save > at)])
            if runs and (rows + stop - at > call_rows or runs[-1][2] == state.slot):
                calls.append(RecurrenceCall(np.array(runs, np.int64), tuple(saves)))
                runs, saves, rows = [], [], 0
            runs.append((seq.first + at - seq.start, stop - at, state.slot))
            if stop in saved:
                saves.append((state.slot, saved[stop]))
            rows, at = rows + stop - at, stop
    calls.append(RecurrenceCall(np.array(runs, np.int64), tuple(saves)))
    return RecurrencePlan(tuple(starts), tuple(calls), temporary)
