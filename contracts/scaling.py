"""How many ranks a running server is to have, and how far that has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from contracts.errors import RequestError

ScaleStatus = Literal["idle", "running", "done", "failed"]


class ScaleTarget(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Ranks of each kind that there are to be. null: as many as there are."""

    attention_ranks: int | None = None
    expert_ranks: int | None = None
    prefill_workers: int | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Of the kinds that are named, by field."""
        found = {name: getattr(self, name) for name in FIELDS}
        return {name: count for name, count in found.items() if count is not None}


FIELDS = tuple(ScaleTarget.__struct_fields__)
MAX_RANKS_PER_KIND = 1024  # of a kind


class ScaleState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last change of the number of ranks. number: counts them. ranks: of each kind that there
    are now. steps: what has been done, in words. reason: why it failed. seconds: since it began, or
    another launcher has gone on with it; or that it took."""

    state: ScaleStatus = "idle"
    number: int = 0
    requested: ScaleTarget = ScaleTarget()
    ranks: dict[str, int] = {}
    steps: list[str] = []
    reason: str = ""
    seconds: float = 0.0


class ScaleCheckpoint(msgspec.Struct, frozen=True):
    """What a launcher leaves to one that takes its ranks over. state: without what it can see by
    itself. resumed: how many launchers have gone on with it so far. least_prefill: workers that
    there are to be at least, where they follow the load; 0: as configured."""

    state: ScaleState = ScaleState()
    resumed: int = 0
    min_prefill: int = 0


def format_counts(counts: Mapping[str, float]) -> str:
    """ "attention_ranks=3, expert_ranks=1"."""
    return ", ".join(f"{name}={count:g}" for name, count in counts.items())


def check_counts(requested: ScaleTarget) -> None:
    """Raises RequestError for what no server has."""
    if not requested.counts:
        raise RequestError(f"no number of ranks is given: give one of {', '.join(FIELDS)}", None)
    for name, count in requested.counts.items():
        if not 1 <= count <= MAX_RANKS_PER_KIND:
            raise RequestError(f"{name}={count}: give 1 to {MAX_RANKS_PER_KIND}", name)


def check_target(requested: ScaleTarget, current: Mapping[str, int]) -> dict[str, int]:
    """What is to change, by field. there: how many there are of the kinds that the server has.
    Raises RequestError for what can never be."""
    check_counts(requested)
    for name, count in requested.counts.items():
        if name not in current:
            raise RequestError(
                f"{name}={count}: this server was started without any: start it with some", name
            )
    return {name: count for name, count in requested.counts.items() if count != current[name]}
