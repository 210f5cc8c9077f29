"""SPEC.json of `tandem plan`: stage models, or a model and a machine."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from actors.planning.planner_inputs import layer_routing, shape_of
from cluster.fleet.hardware import load_hardware
from cluster.fleet.model_folder import download_config, is_hub_id, resolve_model_folder
from cluster.tools.plan.routing import ProfiledRouting
from contracts.config import BUNDLED
from contracts.errors import ConfigError, TandemError
from contracts.hardware import Hardware
from contracts.json_input import read_json_file, struct_from
from models.prediction.routing_counts import RoutingCounts
from models.spec.config_fields import ConfigFields, find_known_model, known_model_names
from models.spec.model import ModelSpec, read_spec, spec_from
from models.weights.checkpoint import element_bytes
from planner.costs.cost_model import Deployment
from planner.costs.prefill_modes import Tier
from planner.costs.stages import MAX_LAYERS, MAX_TOKEN_GROUPS, Linear, PlanSpec, StageModels
from planner.schedule.alternatives import MAX_SAMPLES, Workload
from planner.schedule.deployment_search import DEFAULT_MAX_R2

MAX_FIELD = 1 << 31  # limit of a model's integer fields
MAX_DEVICES = 4096
MAX_TOKENS = 1 << 24

Ranks = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class _Stages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """link: sets both a2e and e2a."""

    attention: Linear
    expert: Linear
    shared: Linear | None = None
    link: Linear | None = None
    a2e: Linear | None = None
    e2a: Linear | None = None


class StagesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A SPEC of stage models. Fields as in planner/costs/stages.py."""

    stages: _Stages
    tokens_per_expert_per_sample: float
    num_layers: int
    max_samples: int
    max_r2: int = DEFAULT_MAX_R2
    has_shared: bool | None = None  # None: whether stages.shared is given
    attention_quadratic_fraction: float | None = None
    attention_chunk_ms: float = 0.0
    attention_context_ms: float = 0.0


class OffloadFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts that are read on demand.

    kept: fraction that fits into memory in the computed type. tier_bytes_per_s: read rate. hits:
    fraction of requested experts in memory (None: as with even routing). stored_bits_per_weight:
    with experts.storage_format, scales included (None: the computed type's).
    """

    kept: Annotated[float, Meta(ge=0, lt=1)]
    tier_bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]
    hits: Annotated[float, Meta(ge=0, le=1)] | None = None
    stored_bits_per_weight: Annotated[float, Meta(gt=0, le=32)] | None = None


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A SPEC of a model and a machine.

    model: a Hugging Face folder (its config.json is enough), "bundled", or the fields of a
    config.json. hardware: a file, a known name, or its fields. attention_ranks, expert_ranks: both,
    or one of them and devices; devices alone: search over their splits. context_tokens: cached
    before each sample's sequence_tokens new ones (decode: sequence_tokens 1). max_samples: a limit
    beside the memory's. memory_bytes: of a device, overrides the hardware's. memory_fraction: the
    usable part. offload: None: all experts fit. routing: a file of `tandem profile --routing`,
    instead of uniform routing. spare_slots: of each rank, beyond its share of experts.
    """

    model: str | dict[str, Any]
    hardware: str | dict[str, Any]
    sequence_tokens: Tokens
    context_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    attention_ranks: Ranks | None = None
    expert_ranks: Ranks | None = None
    devices: Ranks | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = MAX_SAMPLES
    max_r2: Annotated[int, Meta(ge=1, le=MAX_TOKEN_GROUPS)] = DEFAULT_MAX_R2
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    backend: str | None = None
    offload: OffloadFile | None = None
    routing: str | None = None
    spare_slots: Annotated[int, Meta(ge=0, le=MAX_FIELD)] = 0


class ModelProblem(NamedTuple):
    """deployment None: search over the splits.

    tier None: all experts fit. profiled None: uniform routing.
    """

    workload: Workload
    deployment: Deployment | None
    max_r2: int
    tier: Tier | None = None
    profiled: ProfiledRouting | None = None


def read_plan_file(path: Path, devices: int | None = None) -> PlanSpec | ModelProblem:
    """Read a SPEC.

    devices: of the command line, overrides the file's ranks. Raises TandemError, one line.
    """
    tree = read_json_file(path)
    where = str(path)
    if "stages" in tree:
        if devices is not None:
            raise ConfigError(
                "--devices: needs a SPEC with model and hardware, this one has stages"
            )
        return _stage_spec(struct_from(tree, StagesFile, where), where)
    if "model" in tree or "hardware" in tree:
        return _model_problem(struct_from(tree, ModelFile, where), where, devices)
    raise ConfigError(f"{where}: stages: missing; give stages, or model and hardware")


def _stage_spec(file: StagesFile, where: str) -> PlanSpec:
    stages = file.stages
    a2e, e2a = stages.a2e or stages.link, stages.e2a or stages.link
    if a2e is None or e2a is None:
        raise ConfigError(f"{where}: stages.link: missing; give link, or both a2e and e2a")
    has_shared = stages.shared is not None if file.has_shared is None else file.has_shared
    try:
        models = StageModels(
            attention=stages.attention, shared=stages.shared, expert=stages.expert, a2e=a2e, e2a=e2a
        )
        fields = {**msgspec.structs.asdict(file), "stages": models, "has_shared": has_shared}
        return PlanSpec(**fields)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _model_problem(file: ModelFile, where: str, devices: int | None) -> ModelProblem:
    hardware = load_hardware(file.hardware)
    spec = _model(file.model)
    shape = shape_of(spec, element_bytes(spec, file.dtype))
    split, total_devices = _split(file, devices, where)
    total = file.context_tokens + file.sequence_tokens
    if total > spec.max_context_tokens:
        raise ConfigError(
            f"{where}: sequence_tokens: {total} tokens with context_tokens exceed the model's "
            f"context of {spec.max_context_tokens}"
        )
    workload = Workload(
        shape=shape,
        hardware=hardware,
        devices=total_devices,
        sequence_tokens=file.sequence_tokens,
        context_tokens=file.context_tokens,
        usable_bytes=_memory_bytes(file, hardware, total_devices) * file.memory_fraction,
        max_samples=file.max_samples,
        backend=file.backend,
    )
    _check_devices(hardware, workload.devices, where)
    deployment = None if split is None else workload.deployment(*split)
    tier = None if file.offload is None else _tier(file.offload, 8 * shape.element_bytes, where)
    profiled = _profiled(file, spec, split, where)
    return ModelProblem(workload, deployment, file.max_r2, tier, profiled)


def _profiled(
    file: ModelFile, spec: ModelSpec, split: tuple[int, int] | None, where: str
) -> ProfiledRouting | None:
    """Read the routing profile. split: ranks of both groups, if known.

    Raises ConfigError or CheckpointError.
    """
    spare_slots = file.spare_slots
    if file.routing is None:
        if spare_slots:
            raise ConfigError(
                f"{where}: spare_slots: {spare_slots} without routing: the gain of replicas "
                "depends on it; give a file of tandem profile --routing"
            )
        return None
    folder = _folder(file.model) if isinstance(file.model, str) else None
    if folder is None:
        raise ConfigError(
            f"{where}: routing: a profile is of one checkpoint: give model as its folder, not as "
            "the fields of its config.json"
        )
    share = 1 if split is None else spec.num_experts // split[1]
    if spare_slots > max(0, spec.num_experts - share):
        raise ConfigError(
            f"{where}: spare_slots: {spare_slots} beside a rank's share of {share} or more of "
            f"{spec.num_experts} experts: give at most {max(0, spec.num_experts - share)}"
        )
    counts = RoutingCounts.read(Path(file.routing).expanduser(), folder, spec)
    layers = [layer_routing(counts, layer) for layer in spec.moe_layers]
    return ProfiledRouting(layers, spare_slots)


def _tier(given: OffloadFile, computed_bits: int, where: str) -> Tier:
    """computed_bits: of a weight."""
    stored_bits = given.stored_bits_per_weight or computed_bits
    if stored_bits > computed_bits:
        raise ConfigError(
            f"{where}: offload.stored_bits_per_weight: {stored_bits:g}, but a weight is computed "
            f"with as {computed_bits} bits: give at most those, or leave it out"
        )
    return Tier(given.kept, given.tier_bytes_per_s, given.hits, stored_bits / computed_bits)


def _split(file: ModelFile, devices: int | None, where: str) -> tuple[tuple[int, int] | None, int]:
    """Return (attention ranks, expert ranks), None to search, and the number of devices.

    A missing number follows from the others.
    """
    attention, expert = file.attention_ranks, file.expert_ranks
    total = devices or file.devices
    if total is None:
        if attention is None or expert is None:
            name = "expert_ranks" if attention else "attention_ranks"
            raise ConfigError(f"{where}: {name}: missing; give both groups' ranks, or devices")
        return (attention, expert), attention + expert
    if not 2 <= total <= MAX_DEVICES:
        raise ConfigError(f"devices={total}: give 2 to {MAX_DEVICES}, one for each group at least")
    if devices is not None or (attention is None and expert is None):
        return None, total  # --devices requests a search, even if the file has a split
    attention = total - expert if attention is None and expert is not None else attention
    expert = total - attention if expert is None and attention is not None else expert
    assert attention is not None
    assert expert is not None
    if min(attention, expert) < 1 or attention + expert != total:
        raise ConfigError(
            f"{where}: {attention} attention_ranks and {expert} expert_ranks are not the {total} "
            "of devices; leave one of the three out"
        )
    return (attention, expert), total


def _memory_bytes(file: ModelFile, hardware: Hardware, devices: int) -> float:
    """Return the memory of a rank's device; ranks that share devices share their memory."""
    if file.memory_bytes is not None:
        return file.memory_bytes
    shared = max(1.0, devices / hardware.devices) if hardware.devices else 1.0
    return hardware.memory_bytes / shared


def _check_devices(hardware: Hardware, devices: int, where: str) -> None:
    if hardware.shareable:
        return
    if hardware.devices is not None and devices > hardware.devices:
        raise ConfigError(
            f"{where}: devices: {devices} requested, hardware {hardware.name} has "
            f"{hardware.devices}"
        )


def _model(given: str | dict[str, Any]) -> ModelSpec:
    """Read a model: fields of a config.json, a known name, a folder, or a hub id.

    Of a hub id only config.json is downloaded.
    """
    if isinstance(given, str):
        spec = _named_model(given)
        _check_layers(spec.num_layers)
        return spec
    for name, value in given.items():
        if isinstance(value, int) and not -MAX_FIELD < value < MAX_FIELD:
            raise ConfigError(f"model: {name}: {value} is no size of a model")
    layers = given.get("num_hidden_layers")
    _check_layers(layers if isinstance(layers, int) else 0)
    try:
        return spec_from(ConfigFields(Path("model"), given))
    except TandemError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"model: cannot be read: {error}") from None


def _folder(name: str) -> Path | None:
    """Return the model's folder, if it is on this machine."""
    folder = resolve_model_folder(name) if name == BUNDLED else Path(name).expanduser()
    return folder if folder.is_dir() else None


def _named_model(name: str) -> ModelSpec:
    if (folder := _folder(name)) is not None:
        return read_spec(folder)
    if (known := find_known_model(name)) is not None:
        return spec_from(ConfigFields(Path(name), known))
    if is_hub_id(name):
        return read_spec(download_config(name))
    raise ConfigError(
        f"model: {name}: no such folder; give a folder, a hub id, or one of "
        f"{', '.join(known_model_names())}"
    )


def _check_layers(layers: int) -> None:
    if layers > MAX_LAYERS:
        raise ConfigError(f"model: num_hidden_layers: {layers}: give at most {MAX_LAYERS}")
