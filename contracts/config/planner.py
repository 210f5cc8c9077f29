"""Section `planner`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import InputPath, Seconds, Section


class PlannerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Planner that chooses a plan for every batch. Without a plan, section `schedule` applies."""

    enabled: bool = True
    """Run the planner. false: section `schedule` applies."""
    hardware: InputPath | None = None
    """File written by `tandem profile`, or the name of a bundled one. null: learned from
    measurements of the ranks."""
    refit: bool = True
    """Update the hardware file's figures from measurements. false requires `hardware`."""
    extended_search: bool = True
    """Include plans outside FinDEP's search space."""
    answer_timeout_s: Seconds = 1.0
    """Seconds after which a rank reports a missing answer and stops sending requests until it
    arrives."""
    report_interval_s: Annotated[float, Meta(ge=0, le=3600)] = 0.1
    """Seconds between two measured batches of a rank. 0: every batch is measured."""

    def __post_init__(self) -> None:
        if self.hardware is None and not self.refit:
            raise ValueError(
                "planner.refit=false without planner.hardware: stage times are unknown; "
                "name a hardware file, or set planner.enabled=false"
            )
