"""Which rank holds which experts, layer by layer: made once at launch, the same on every rank."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec

Fingerprint = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Experts of all ranks as one line of slots, rank after rank, of which each layer has its own:

        rank         0       |     1     |   2
        slots     0  1  2    |  3  4     |  5  6        slots_per_rank = (3, 2, 2)
        layer 1   0  1  2    |  3  4     |  0  5        expert_of_slot[1]: expert 0 has two replicas

    slots_per_rank: the same in every layer. expert_of_slot: [L][slot], empty where a layer has no
    experts. Every expert of a layer is in one slot or more, on different ranks. A placement without
    ranks is of a group that divides no experts. generation: 0 at launch; each that a running group
    goes over to has the next number.
    """

    num_experts: int = 0
    generation: int = 0
    slots_per_rank: tuple[int, ...] = ()
    expert_of_slot: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(slots < 0 for slots in self.slots_per_rank):
            raise ValueError(f"slots_per_rank={self.slots_per_rank}: give numbers from 0")
        for layer, experts in enumerate(self.expert_of_slot):
            if experts:
                self._check_layer(layer, experts)

    def _check_layer(self, layer: int, experts: tuple[int, ...]) -> None:
        slots, where = sum(self.slots_per_rank), f"expert_of_slot[{layer}]"
        if len(experts) != slots:
            raise ValueError(f"{where} has {len(experts)} slots, slots_per_rank adds up to {slots}")
        if self.num_experts > slots:  # before a set of any number is made
            raise ValueError(f"{where} has {slots} slots for {self.num_experts} experts: too few")
        wrong = set(experts) ^ set(range(self.num_experts))
        if wrong:
            raise ValueError(
                f"{where}: expert {min(wrong)} is not placed, or not one of the "
                f"{self.num_experts} experts: give each a slot or more"
            )
        for rank, (low, high) in enumerate(self.slot_bounds):
            if len(set(experts[low:high])) < high - low:
                raise ValueError(f"{where}: rank {rank} has an expert twice: once is enough")

    @property
    def ranks(self) -> int:
        return len(self.slots_per_rank)

    @functools.cached_property
    def slot_bounds(self) -> tuple[tuple[int, int], ...]:
        """[first, last) slot of each rank."""
        return bounds_of(self.slots_per_rank)

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits: equal placements have equal ones."""
        body = msgspec.msgpack.encode((self.num_experts, self.slots_per_rank, self.expert_of_slot))
        return hashlib.sha256(body).hexdigest()[:16]

    def experts_of(self, rank: int) -> dict[int, tuple[int, ...]]:
        """By layer, the expert ids of `rank` in the order of its local indices: none, where the
        placement is of fewer ranks."""
        low, high = self.slot_bounds[rank] if rank < self.ranks else (0, 0)
        layers = enumerate(self.expert_of_slot)
        return {layer: experts[low:high] for layer, experts in layers if experts}


def bounds_of(slots_per_rank: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, last) slot of each rank."""
    return tuple(itertools.pairwise(itertools.accumulate(slots_per_rank, initial=0)))


class PlacementUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What an expert rank is told by its launcher: its next placement, which may be of more ranks
    or of fewer, and the one that is used now, as a rank that has just come does not know it.
    within_s: how long that may take."""

    placement: Placement
    present: Placement
    within_s: float


class PlacementState(msgspec.Struct, frozen=True, kw_only=True):
    """What an expert rank has. placement: what all attention ranks use, and no other any more.
    newest: the largest generation that it was told of; under_way: the one that is to come.
    failures: why the latest that have failed did. expert_bytes: of one expert of one layer, 0 where
    it takes no memory of its own. node: with one value all ranks share free_bytes."""

    placement: Placement
    newest: int
    under_way: int | None = None
    failures: dict[int, str] = {}
    expert_bytes: int = 0
    free_bytes: int = 0
    node: str = ""


class PlacementFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tandem place` writes: a placement, and what it was made for. checkpoint, tokenizer: 64
    hexadecimal digits each, as a routing profile has them."""

    checkpoint: Fingerprint
    tokenizer: Fingerprint
    placement: Placement


def placement_mismatch(peer: str, peer_digest: str, own_digest: str) -> str:
    """What a peer is refused with."""
    return (
        f"{peer} has its experts placed as {peer_digest}, here they are as {own_digest}: "
        "launch all ranks of a group with one placement"
    )
