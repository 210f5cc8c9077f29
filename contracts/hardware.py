"""Hardware files: cost of the stages on a machine, per call, per FLOP and per byte.

Coefficients are independent of the model; planner/costs/cost_model.py derives stage times from a
model's shape. A multiply-add is 2 FLOPs. `tandem profile` writes such a file; the package contains
some (cluster/fleet/hardware_files/).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FORMAT_VERSION = 1

Ms = Annotated[float, Meta(ge=0, le=1e6)]
Fraction = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class AttentionCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a layer's attention half for one micro-batch, a sum of these terms.

    call_ms                once
    projection_ms          per projection
    sequence_ms            per sequence
    linear_ms_per_flop     work per token (projections, router)
    attended_ms_per_flop   work per (query, key) pair within the mask
    context_ms_per_byte    keys and values read from the pool
    prompt_call_ms         per chunk of a prompt
    decode_call_ms         per group of decoding sequences
    packet_ms              per expert rank beyond the first
    copied_ms_per_byte     per copy of a row beyond the first
    """

    call_ms: Ms
    linear_ms_per_flop: Ms
    attended_ms_per_flop: Ms
    projection_ms: Ms = 0.0
    sequence_ms: Ms = 0.0
    context_ms_per_byte: Ms = 0.0
    prompt_call_ms: Ms = 0.0
    decode_call_ms: Ms = 0.0
    packet_ms: Ms = 0.0
    copied_ms_per_byte: Ms = 0.0

    def __post_init__(self) -> None:
        if not self.linear_ms_per_flop > 0:
            raise ValueError("attention.linear_ms_per_flop=0: give the time of a FLOP in ms")


class ServingCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a batch on an attention rank outside of the layers with experts.

    batch_ms: per batch. micro_batch_ms: per micro-batch. sequence_ms: per sequence (admission,
    scheduling, answer). token_ms: per token (block allocation, embedding). Logits cost the same per
    FLOP as attention's linear work.
    """

    batch_ms: Ms
    micro_batch_ms: Ms
    sequence_ms: Ms
    token_ms: Ms


class SharedCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a layer's shared experts.

    call_ms: once. projection_ms: per matrix, three per shared expert. ms_per_flop: per FLOP.
    """

    call_ms: Ms
    ms_per_flop: Ms
    projection_ms: Ms = 0.0


class ExpertCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of the experts of one rank and layer for one token group.

    call_ms: once. expert_ms, and weight_ms_per_byte times its size: per expert. ms_per_flop: per
    FLOP of a (token, expert) pair.
    """

    call_ms: Ms
    expert_ms: Ms
    ms_per_flop: Ms
    weight_ms_per_byte: Ms = 0.0

    def __post_init__(self) -> None:
        if not self.ms_per_flop > 0:
            raise ValueError("expert.ms_per_flop=0: give the time of a FLOP in ms")


class LinkCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a transfer between the groups: alpha_ms + ms_per_byte x bytes of the busiest rank.

    attention_ranks, expert_ranks: the only split for which the values hold (None: any).
    deduplicated: a token is sent once per expert rank instead of once per chosen expert, as in
    FinDEP's Eq. 4.
    """

    backend: Name
    direction: Literal["a2e", "e2a", "both"]
    alpha_ms: Ms
    ms_per_byte: Ms
    attention_ranks: Count | None = None
    expert_ranks: Count | None = None
    deduplicated: bool = True


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One measured size: label, size on the plot's axis, measured and modelled ms."""

    label: str
    size: float
    measured_ms: float
    modelled_ms: float


class Fit(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quality of a fit.

    median_error_fraction: of |modelled - measured| over measured. uncertain: a slope vanished in
    the noise of the measurement and is bounded from below instead.
    """

    stage: Name
    size_unit: Name
    r2: float
    median_error_fraction: Fraction
    points: list[Point] = []
    uncertain: bool = False


class Hardware(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device and the links between several.

    kind: measured by `tandem profile`, printed in a paper, or derived from public figures (data
    sheets) and stated assumptions. source: in words. memory_bytes: of one rank's device. devices:
    their number; None if not known. shareable: more ranks than devices may take turns, as processes
    do on cores. shared None: shared experts cost as much as routed ones. serving None: no cost.
    """

    version: int
    name: Name
    kind: Literal["measured", "printed", "public figures"]
    source: str
    device: Name
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]
    attention: AttentionCost
    expert: ExpertCost
    links: Annotated[list[LinkCost], Meta(min_length=1, max_length=1000)]
    shared: SharedCost | None = None
    serving: ServingCost | None = None
    devices: Count | None = None
    shareable: bool = False
    fits: list[Fit] = []

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ValueError(
                f"version={self.version}: this release reads version {FORMAT_VERSION}; "
                "run `tandem profile` again"
            )
