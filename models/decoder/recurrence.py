"""Recurrent states of a batch: which slots of the pool they start from, and where they are kept.

tokens      0 ........ 32 ........ 64 ..... 70       a slice [32, 70) of a prompt
source      '-- slot 7 --'                           a checkpoint of an earlier prompt
slot                    3 ──────────────────> 3      changes token by token
saves                               5                a new checkpoint: (64, 5)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.attention_ops import SequenceRows


class StateRun(NamedTuple):
    """States of a slice: they start as those in `source` (None: zeros), and are kept in `slot`.

    saves: (position, slot) in order: slots for copies of the states after the tokens before it.
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
