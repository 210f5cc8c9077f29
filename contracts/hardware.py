"""A hardware file: what stages cost on some machine, per call, per FLOP and per byte.

Coefficients are per FLOP and per byte, not per token, so that a file serves any model: times of a
model follow from its shape (planner/costs/cost_model.py). A multiply-add is 2 FLOPs. `tandem
profile` writes such a file; some come with the package (cluster/fleet/hardware_files/).
"""

from __future__ import annotations

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
    """The attention half of a layer, for one micro-batch: a sum of

    call_ms; projection_ms for each projection; sequence_ms for each sequence;
    linear_ms_per_flop for what is done once per token (projections, router);
    attended_ms_per_flop for what is done once per (query, key) pair that the mask leaves;
    context_ms_per_byte for keys and values that are read back from the pool;
    prompt_call_ms for each tile of 128 rows of a prompt, or group of short ones; decode_call_ms for
    each group of sequences that decode;
    packet_ms for each expert rank beyond the first, which gets a packet and answers it;
    copied_ms_per_byte for each copy of a row beyond the first: cut out, and its answer added.
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
    """What an attention rank does for a batch outside of the layers with experts: batch_ms;
    micro_batch_ms for each, which is made ready; sequence_ms for each sequence, which is admitted,
    scheduled and answered; token_ms for each token, whose blocks are booked and which is embedded.
    Logits cost what attention's linear FLOPs do.
    """

    batch_ms: Ms
    micro_batch_ms: Ms
    sequence_ms: Ms
    token_ms: Ms


class SharedCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared experts of a layer: call_ms, projection_ms for each of the three matrices of each
    shared expert, ms_per_flop."""

    call_ms: Ms
    ms_per_flop: Ms
    projection_ms: Ms = 0.0


class ExpertCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of one rank and layer, for one token group: call_ms once, expert_ms and
    weight_ms_per_byte times its bytes for each expert, ms_per_flop for each (token, expert) pair's
    FLOPs."""

    call_ms: Ms
    expert_ms: Ms
    ms_per_flop: Ms
    weight_ms_per_byte: Ms = 0.0

    def __post_init__(self) -> None:
        if not self.ms_per_flop > 0:
            raise ValueError("expert.ms_per_flop=0: give the time of a FLOP in ms")


class LinkCost(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A payload's way between the groups: alpha_ms, and ms_per_byte of what the busiest rank sends
    or receives.

    attention_ranks, expert_ranks: the only split that the figures hold for (None: any).
    deduplicated: a token travels once to each expert rank that has work for it, as here, instead of
    once per chosen expert, as in FinDEP's Eq. 4.
    """

    backend: Name
    direction: Literal["a2e", "e2a", "both"]
    alpha_ms: Ms
    ms_per_byte: Ms
    attention_ranks: Count | None = None
    expert_ranks: Count | None = None
    deduplicated: bool = True


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One measured size: its label, the size for the plot's axis, the measured and modelled ms."""

    label: str
    size: float
    measured_ms: float
    modelled_ms: float


class Fit(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well a model describes what was measured. median_error_fraction: of |modelled - measured|
    over measured."""

    stage: Name
    size_unit: Name
    r2: float
    median_error_fraction: Fraction
    points: list[Point] = []


class Hardware(_Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device and what joins several.

    kind says where the figures are from: measured by `tandem profile`, printed in a paper, or put
    together of public figures (data sheets) and stated assumptions. source: in words. memory_bytes:
    of one rank's device. devices: how many there are, None where it is not known. shareable: more
    ranks than that take turns on them, as processes do on cores. shared None: not measured; shared
    experts are then taken to cost what routed ones do. serving None: not measured, taken as free.
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
