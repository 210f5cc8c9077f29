"""Placement of experts on ranks, layer by layer. Equal on every rank."""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec

Fingerprint = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Experts of all ranks as one row of slots per layer, rank after rank.

        rank         0       |     1     |   2
        slots     0  1  2    |  3  4     |  5  6        slots_per_rank = (3, 2, 2)
        layer 1   0  1  2    |  3  4     |  0  5        expert_of_slot[1]: expert 0 has two replicas

    slots_per_rank: the same in every layer. expert_of_slot: [L][slot], empty for a layer without
    experts. Every expert of a layer has one slot or more, on different ranks. A placement without
    ranks belongs to a group that does not divide experts. generation: 0 at launch, incremented by
    every change.
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
        """Return the [first, last) slot of each rank."""
        return bounds_of(self.slots_per_rank)

    @functools.cached_property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the placement."""
        body = msgspec.msgpack.encode((self.num_experts, self.slots_per_rank, self.expert_of_slot))
        return hashlib.sha256(body).hexdigest()[:16]

    def experts_of(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Return layer → expert ids of `rank` by local index; empty if there is no such rank."""
        low, high = self.slot_bounds[rank] if rank < self.ranks else (0, 0)
        layers = enumerate(self.expert_of_slot)
        return {layer: experts[low:high] for layer, experts in layers if experts}


def bounds_of(slots_per_rank: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the [first, last) slot of each rank."""
    return tuple(itertools.pairwise(itertools.accumulate(slots_per_rank, initial=0)))


class PlacementUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Proposal to an expert rank: its next placement.

    present: the present one, if the launcher proposes another number of ranks. within_s: time for
    the change; 0: the default.
    """

    placement: Placement
    present: Placement | None = None
    within_s: float = 0.0


class PlacementState(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of an expert rank.

    placement: the one that all attention ranks use. newest: the largest generation received;
    under_way: the one being prepared. failures: generation → reason, of the latest failures.
    expert_bytes: of one expert of one layer; 0 if it needs no memory of its own. node: ranks with
    an equal value share free_bytes. links: attention ranks that are linked.
    """

    placement: Placement
    newest: int
    under_way: int | None = None
    failures: dict[int, str] = {}
    expert_bytes: int = 0
    free_bytes: int = 0
    node: str = ""
    links: int = 0


class PlacementFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """File written by `tandem place`: a placement, and the model it was made for.

    checkpoint, tokenizer: 64 hexadecimal digits each, as in a routing profile.
    """

    checkpoint: Fingerprint
    tokenizer: Fingerprint
    placement: Placement


def placement_mismatch(peer: str, peer_digest: str, own_digest: str) -> str:
    """Return the error message for a peer with another placement."""
    return (
        f"{peer} has its experts placed as {peer_digest}, here they are as {own_digest}: "
        "launch all ranks of a group with one placement"
    )
