"""The configuration: frozen structs, decoded once by `load_config` and passed by value.

msgspec checks the bounds of fields when it decodes; `__post_init__` checks rules across fields. The
string below a field is its meaning, with the unit, in `tandem config` and docs/configuration.md.
"""

from contracts.config.batch import BatchConfig
from contracts.config.channel import SPIN_S, ChannelConfig
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
from contracts.config.section import InputPath, OutputFolder
from contracts.config.serve import ServeConfig
from contracts.config.tandem import TandemConfig
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
