"""Requested number of ranks of a running server, and the progress of the change."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from contracts.errors import RequestError

ScaleStatus = Literal["idle", "running", "done", "failed"]


class ScaleTarget(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Requested ranks of each kind. null: no change."""

    attention_ranks: int | None = None
    expert_ranks: int | None = None
    prefill_workers: int | None = None

    @property
    def counts(self) -> dict[str, int]:
        found = {name: getattr(self, name) for name in FIELDS}
        return {name: count for name, count in found.items() if count is not None}


FIELDS = tuple(ScaleTarget.__struct_fields__)
MAX_RANKS_PER_KIND = 1024


class ScaleState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latest change of the number of ranks.

    number: sequence number of the change. ranks: present ranks of each kind. steps: completed
    steps. reason: of a failure. seconds: since the start, or since another launcher resumed it; at
    the end, the duration.
    """

    state: ScaleStatus = "idle"
    number: int = 0
    requested: ScaleTarget = ScaleTarget()
    ranks: dict[str, int] = {}
    steps: list[str] = []
    reason: str = ""
    seconds: float = 0.0


class ScaleCheckpoint(msgspec.Struct, frozen=True):
    """State for a launcher that adopts the ranks.

    state: without what can be observed. resumed: number of launchers that have resumed the change.
    min_prefill: minimum workers with autoscaling; 0: as configured.
    """

    state: ScaleState = ScaleState()
    resumed: int = 0
    min_prefill: int = 0


def format_counts(counts: Mapping[str, float]) -> str:
    """Return counts as text, such as "attention_ranks=3, expert_ranks=1"."""
    return ", ".join(f"{name}={count:g}" for name, count in counts.items())


def check_counts(requested: ScaleTarget) -> None:
    """Raise RequestError for counts that no server supports."""
    if not requested.counts:
        raise RequestError(f"no number of ranks is given: give one of {', '.join(FIELDS)}", None)
    for name, count in requested.counts.items():
        if not 1 <= count <= MAX_RANKS_PER_KIND:
            raise RequestError(f"{name}={count}: give 1 to {MAX_RANKS_PER_KIND}", name)


def check_target(requested: ScaleTarget, current: Mapping[str, int]) -> dict[str, int]:
    """Return the counts that change, by field. Raises RequestError if the server lacks the kind."""
    check_counts(requested)
    for name, count in requested.counts.items():
        if name not in current:
            raise RequestError(
                f"{name}={count}: this server was started without any: start it with some", name
            )
    return {name: count for name, count in requested.counts.items() if count != current[name]}
