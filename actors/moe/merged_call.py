"""A call of experts on an expert rank that merges the token groups of one queue."""

from __future__ import annotations

from typing import NamedTuple

import torch

from actors.channels.base import Header, Packet
from actors.moe.rank_experts import MergedPairs, RankExperts
from contracts.clock import Clock


class QueueKey(NamedTuple):
    """Common properties of the token groups of one merged call."""

    priority: int
    layer: int
    generation: int

    @staticmethod
    def of(header: Header) -> QueueKey:
        return QueueKey(int(header.priority), header.layer, header.generation)


class MergedGroups(NamedTuple):
    """Token groups of one call; group g owns rows first_row[g] to first_row[g + 1]."""

    pairs: MergedPairs
    first_row: list[int]


def merge(packets: list[Packet]) -> MergedGroups:
    """Concatenate token groups; pairs are sorted by local expert, ties in packet order."""
    if len(packets) == 1:
        x_UD, rows_N, weights_N, counts_e = packets[0].tensors
        return MergedGroups(MergedPairs(x_UD, rows_N, weights_N, counts_e), [0, x_UD.shape[0]])
    first_row = [0]
    rows, experts = [], []
    for packet in packets:
        x_UD, rows_N, _, counts_e = packet.tensors
        rows.append(rows_N + first_row[-1])
        experts.append(torch.arange(len(counts_e), device=x_UD.device).repeat_interleave(counts_e))
        first_row.append(first_row[-1] + x_UD.shape[0])
    order_N = torch.cat(experts).argsort(stable=True)
    pairs = MergedPairs(
        torch.cat([packet.tensors[0] for packet in packets]),
        torch.cat(rows)[order_N],
        torch.cat([packet.tensors[2] for packet in packets])[order_N],
        torch.stack([packet.tensors[3] for packet in packets]).sum(0),
    )
    return MergedGroups(pairs, first_row)


class MergedCall:
    """A merged call, from its first slice to its answers."""

    __slots__ = ("computation", "groups", "interrupted", "packets", "y_UD")

    def __init__(self, packets: list[Packet], experts: RankExperts) -> None:
        self.packets = packets
        self.groups = merge(packets)
        self.interrupted = False
        self.y_UD: torch.Tensor | None = None  # set when complete
        self.computation = experts.begin(packets, self.groups.pairs)

    @property
    def key(self) -> QueueKey:
        return QueueKey.of(self.packets[0].header)

    @property
    def tokens(self) -> int:
        return self.groups.first_row[-1]

    def run(self, until_s: float, clock: Clock) -> None:
        """Run to the end, to the first yield after until_s, or until experts are missing."""
        steps = self.computation.steps
        try:
            next(steps)
            while clock() < until_s and self.computation.missing is not None:
                next(steps)
        except StopIteration as done:
            self.y_UD = done.value
