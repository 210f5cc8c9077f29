"""Section `scaling`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Count, Seconds, Section


class ScalingConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling of prefill workers between groups.prefill_ranks and max_prefill_ranks.

    The utilization of a worker is the work of its open requests over its saturation threshold
    (prefill.saturation).
    """

    max_prefill_ranks: Count | None = None
    """Maximum prefill workers. null: no autoscaling. Requires prefill.experts=resident, streamed or
    cached."""
    scale_up_utilization: Annotated[float, Meta(gt=0, le=100)] = 0.8
    """Scale up when mean utilization exceeds this."""
    scale_down_utilization: Annotated[float, Meta(ge=0, le=100)] = 0.4
    """Scale down when the mean utilization of the remaining workers would stay below this. Must be
    below scale_up_utilization."""
    look_back_period_s: Seconds = 5.0
    """Seconds over which utilization is averaged. After a change no decision is made for as
    long."""
    downscale_delay_s: Seconds = 60.0
    """Seconds that a worker must be redundant before it is drained and stopped."""

    def __post_init__(self) -> None:
        if self.scale_down_utilization >= self.scale_up_utilization:
            raise ValueError(
                f"scaling.scale_down_utilization={self.scale_down_utilization:g} is not below "
                f"scale_up_utilization={self.scale_up_utilization:g}: workers would start and "
                "stop at the same load"
            )
