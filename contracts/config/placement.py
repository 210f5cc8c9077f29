"""Section `placement`."""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.config.section import Count, InputPath, NonNegative, OutputFolder, Seconds, Section


class PlacementConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assignment of experts to expert ranks, replicas, and rebalancing under traffic."""

    file: InputPath | None = None
    """File written by `tandem place`, for expert ranks, or for prefill workers with "all_to_all" if
    there are no expert ranks. null: experts in order, one replica each."""
    spare_slots: NonNegative = 0
    """Additional slots per layer and expert rank, for replicas made by rebalancing. The number in
    `file` takes precedence."""
    rebalance: Literal["off", "once", "continuous"] = "off"
    """Move experts according to traffic: never, once after enough samples, or continuously."""
    move_timeout_s: Seconds = 60.0
    """Seconds that a move may take. After that it is cancelled and the current placement stays."""
    max_move_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """Maximum bytes of experts that a rank loads for one move, which is also the additional memory
    it needs. Larger changes are made in several moves."""
    bytes_per_s: Annotated[float, Meta(gt=0)] = 100e6
    """Maximum bytes per second at which a rank loads experts while serving."""
    payback_s: Seconds = 60.0
    """Seconds of traffic within which a move must save more time than it costs."""
    sample_tokens: Count = 256
    """Tokens per second whose routing each attention rank records."""
    record: OutputFolder | None = None
    """Folder in which the planner writes a routing profile, routing.safetensors, once a minute and
    at exit. null: no profile."""
