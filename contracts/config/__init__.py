"""The configuration: frozen structs, decoded once by `load_config` and passed by value.

msgspec checks the bounds of fields when it decodes; `__post_init__` checks rules across fields. The
string below a field is its meaning, with the unit, in `tandem config` and docs/configuration.md.
"""

from contracts.config.batch import BatchConfig
from contracts.config.channel import SPIN_S, ChannelConfig
from contracts.config.devices import refusal
from contracts.config.experts import ExpertsConfig
from contracts.config.groups import GroupsConfig
from contracts.config.http import LOOPBACK, HttpConfig
from contracts.config.kv import KvConfig
from contracts.config.limits import LimitsConfig
from contracts.config.log import LogConfig
from contracts.config.metrics import MetricsConfig
from contracts.config.model import BUNDLED, ModelConfig
from contracts.config.placement import PlacementConfig
from contracts.config.planner import PlannerConfig
from contracts.config.prefill import SCALABLE, PrefillConfig
from contracts.config.priority import PriorityConfig
from contracts.config.scaling import ScalingConfig
from contracts.config.schedule import ScheduleConfig
from contracts.config.section import InputPath, OutputFolder, Section
from contracts.config.serve import ServeConfig
from contracts.config.trace import TraceConfig

__all__ = [
    "BUNDLED",
    "LOOPBACK",
    "SCALABLE",
    "SPIN_S",
    "BatchConfig",
    "ChannelConfig",
    "ExpertsConfig",
    "GroupsConfig",
    "HttpConfig",
    "InputPath",
    "KvConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "OutputFolder",
    "PlacementConfig",
    "PlannerConfig",
    "PrefillConfig",
    "PriorityConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "ServeConfig",
    "TandemConfig",
    "TraceConfig",
]


class TandemConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one application."""

    model: ModelConfig = ModelConfig()
    groups: GroupsConfig = GroupsConfig()
    channel: ChannelConfig = ChannelConfig()
    kv: KvConfig = KvConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    priority: PriorityConfig = PriorityConfig()
    prefill: PrefillConfig = PrefillConfig()
    scaling: ScalingConfig = ScalingConfig()
    experts: ExpertsConfig = ExpertsConfig()
    placement: PlacementConfig = PlacementConfig()
    planner: PlannerConfig = PlannerConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    batch: BatchConfig = BatchConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    trace: TraceConfig = TraceConfig()

    def __post_init__(self) -> None:
        if self.prefill.experts == "cached" and not self.experts.is_bounded:
            raise ValueError(
                "prefill.experts=cached: set the number of experts a worker keeps, of all layers "
                "together: experts.slots, or experts.bytes"
            )
        self._check_scaling()
        reason = "" if self.groups.device == "auto" else refusal(self, self.groups.device)
        if reason:
            raise ValueError(reason)

    def _check_scaling(self) -> None:
        most, least = self.scaling.max_prefill_ranks, self.groups.prefill_ranks
        if most is None:
            return
        if not 1 <= least <= most:
            raise ValueError(
                f"scaling.max_prefill_ranks={most} with groups.prefill_ranks={least}: give 1 or "
                f"more to begin with, and at most {most}"
            )
        if self.prefill.experts not in SCALABLE:
            raise ValueError(
                f"scaling.max_prefill_ranks with prefill.experts={self.prefill.experts}: its "
                f"workers divide the experts among them; use {', '.join(SCALABLE)}"
            )

    @property
    def prefill_slots(self) -> int:
        """Maximum number of prefill workers."""
        return self.scaling.max_prefill_ranks or self.groups.prefill_ranks
