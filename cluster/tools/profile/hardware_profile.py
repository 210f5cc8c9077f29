"""`tandem profile`: measures this machine with a model and fits a hardware file to it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from actors.planning.link_probe import LinkTransfer, link_probe
from actors.planning.planner_inputs import shape_of
from actors.planning.stage_probe import AttentionTask, ProbedPass, StageProbe, pool_tokens_for
from actors.ranks.serving_rank import bound_memory, set_device_environment
from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.plots import saved_figure
from contracts import machine
from contracts.clock import monotonic_s
from contracts.errors import ConfigError
from contracts.hardware import (
    FORMAT_VERSION,
    AttentionCost,
    ExpertCost,
    Fit,
    Hardware,
    LinkCost,
    ServingCost,
    SharedCost,
)
from contracts.traces import Stage
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint, resolve_dtype
from planner.costs.model_shape import ModelShape, count_tokens
from planner.costs.stage_fit import (
    AttentionSample,
    ExpertSample,
    ServingSample,
    SizedSample,
    fit_attention,
    fit_expert,
    fit_link,
    fit_serving,
    fit_shared,
)

BACKENDS: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")  # of CPUs
SEEDS = 3  # of a batch's tokens, in turn: routing differs, sizes of products recur
MAX_ROUNDS = 15
LEAST_ROUNDS = 3
MAX_ATTEMPTS = 3  # if noise makes a slope vanish
LINK_ROUNDS = 30
LINK_BYTES = (64, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
MAX_BATCH_TOKENS = 8192
MAX_RAGGED_TOKENS = 2048
LINK_SHARE = 0.2  # of the time
SEVERAL_SHARE = 0.2  # of what is left, with several expert ranks
SEVERAL = 4  # expert ranks, to separate the cost of further packets
MAX_SEVERAL_TOKENS = 2048
SERVED = ((1, 64), (4, 64), (16, 64), (32, 64), (64, 16), (1, 1024), (4, 512))  # count, tokens

Chunks = tuple[tuple[int, int], ...]
Dtype = Literal["auto", "bfloat16", "float32"]
Found = TypeVar("Found")


def rank_device(name: str) -> torch.device:
    """Return the device of a name; "auto": a GPU if there is one. Raises ConfigError."""
    if name != "cpu":
        set_device_environment()
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
    if name == "cuda":
        raise ConfigError("--device cuda: torch finds no GPU: run `tandem doctor`, or give cpu")
    return torch.device("cpu")


def link_ends(device: torch.device) -> dict[str, tuple[str, str]]:
    """Return the links to measure, by backend the devices of both ends: one GPU, or two."""
    if device.type == "cpu":
        return dict.fromkeys(BACKENDS, ("cpu", "cpu"))
    gpus = torch.cuda.device_count()
    return dict.fromkeys(("ipc", "nccl")[:gpus], ("cuda:0", f"cuda:{min(1, gpus - 1)}"))


def device_fields(device: torch.device) -> dict[str, Any]:
    """Return the fields of a hardware file that describe a rank's device."""
    cores = machine.whole_cores()
    name, devices, memory_bytes = (
        f"one core of {_processor()}",
        cores,
        machine.total_bytes() // cores,
    )
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name, devices, memory_bytes = gpu.name, torch.cuda.device_count(), gpu.total_memory
    fields = {"device": name, "devices": devices, "memory_bytes": memory_bytes}
    return {**fields, "shareable": device.type == "cpu"}


def profile(folder: Path, dtype_name: Dtype, seconds: float, device_name: str) -> Hardware:
    """Measure attention, shared experts, experts and links, one core or GPU for each side.

    Raises ConfigError, ResourceError, CheckpointError, ChannelError.
    """
    if not 5 <= seconds <= 3600:
        raise ConfigError(f"--seconds {seconds:g}: give 5 to 3600")
    spec = check_checkpoint(folder)
    dtype = resolve_dtype(spec, dtype_name)
    device = rank_device(device_name)
    bound_memory()  # as in ranks
    shape = shape_of(spec, dtype.itemsize)
    with _one_thread():
        costs = _until_certain(
            lambda: _fit_stages(spec, shape, _measure_stages(folder, seconds, spec, dtype, device)),
            lambda found: found.fits,
        )
        links, link_fits = _until_certain(
            lambda: _measure_links(link_ends(device), LINK_SHARE * seconds), lambda found: found[1]
        )
    precision = str(dtype)[6:]
    return Hardware(
        version=FORMAT_VERSION,
        name=f"{platform.node()}-{precision}",
        kind="measured",
        source=f"tandem profile on {folder.name} ({spec.architecture}), "
        f"{precision}, one {'core' if device.type == 'cpu' else 'GPU'} a rank, "
        f"torch {torch.__version__}",
        **device_fields(device),
        attention=costs.attention,
        shared=costs.shared,
        serving=costs.serving,
        expert=costs.expert,
        links=links,
        fits=[*costs.fits, *link_fits],
    )


class _StageCosts(NamedTuple):
    attention: AttentionCost
    shared: SharedCost | None
    serving: ServingCost
    expert: ExpertCost
    fits: list[Fit]


def _until_certain(measure: Callable[[], Found], fits_of: Callable[[Found], list[Fit]]) -> Found:
    """Measure again while noise makes a slope vanish; the last attempt counts."""
    for _ in range(MAX_ATTEMPTS - 1):
        found = measure()
        if not any(fit.uncertain for fit in fits_of(found)):
            return found
    return measure()


def _fit_stages(
    spec: ModelSpec, shape: ModelShape, measured: tuple[_Measured, _Measured, list[ServingSample]]
) -> _StageCosts:
    stages, several, served = measured
    attention_samples = _attention_samples(spec, stages) + _attention_samples(
        spec, several, min(SEVERAL, spec.num_experts)
    )
    attention, attention_fit = fit_attention(shape, attention_samples)
    expert, expert_fit = fit_expert(shape, _expert_samples(stages) + _expert_samples(several))
    shared, shared_fits = _shared(shape, stages)
    serving, serving_fit = fit_serving(shape, attention, served)
    fits = [attention_fit, *shared_fits, expert_fit, serving_fit]
    return _StageCosts(attention, shared, serving, expert, fits)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as a rank does by default (`groups.torch_threads`)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batches(max_context_tokens: int) -> list[Chunks]:
    """Return micro-batches to measure, cheapest first.

    Prompts, chunks behind a cached prefix, decode; of equal and of different lengths.
    """
    longest = min(max_context_tokens, MAX_BATCH_TOKENS)
    wanted = [
        *((count, 0, tokens) for count in (1, 4, 16) for tokens in (16, 64, 256, 1024, 4096)),
        (1, 0, 1),
        (1, 0, 4),
        *((count, prefix, 64) for count in (1, 4) for prefix in (256, 1024, 4096)),
        *((count, context, 1) for count in (1, 8, 64) for context in (64, 512, 2048)),
    ]
    found = {
        ((start, start + new),) * count
        for count, start, new in wanted
        if start + new <= longest and count * new <= MAX_BATCH_TOKENS
    }
    found.update(_ragged(count, min(longest, MAX_RAGGED_TOKENS)) for count in (6, 12, 24, 48))
    found.update(_prompts(count, longest) for count in (8, 16, 32))
    pool = [chunks for chunks in found if pool_tokens_for(chunks) <= 16 * MAX_BATCH_TOKENS]
    return sorted(pool, key=_size)


def _ragged(count: int, longest: int) -> Chunks:
    """Mix decode (half), prompts (a third) and chunks with a prefix, of 16 to `longest` tokens."""
    chunks = []
    for number in range(count):
        tokens = max(16, int(longest ** ((number + 1) / count)) - 64)
        kind = ("decode", "prompt", "decode", "prompt", "decode", "chunk")[number % 6]
        if kind == "decode":
            chunks.append((tokens, tokens + 1))
        elif kind == "prompt":
            chunks.append((0, max(16, tokens // 4)))
        else:
            chunks.append((tokens, tokens + 32))
    return tuple(chunks)


def _prompts(count: int, longest: int) -> Chunks:
    """Return prompts of different lengths, like rows to classify.

    Half have at most 67 tokens; the longest has four to six times as many.
    """
    lengths = [12 * (10 ** (1.5 * (number + 0.5) / count)) for number in range(count)]
    return tuple((0, max(1, min(longest, round(each)))) for each in lengths)


def _size(chunks: Chunks) -> float:
    """Estimate the time in tokens, for sorting."""
    return sum((stop - start) * (1 + (start + stop) / 4096) for start, stop in chunks)


def label_of(chunks: Chunks) -> str:
    """Return "4 x 256 tokens", "8 x 1 tokens after 512" or "12 sequences, 340 tokens"."""
    start, stop = chunks[0]
    if len(set(chunks)) > 1:
        return f"{len(chunks)} sequences, {count_tokens(chunks)} tokens"
    return f"{len(chunks)} x {stop - start} tokens" + (f" after {start}" if start else "")


_Measured = dict[Chunks, list[ProbedPass]]


def _measure_stages(
    folder: Path, seconds: float, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[_Measured, _Measured, list[ServingSample]]:
    """Measure with one expert rank, with several, and outside of the layers."""
    wanted = batches(spec.max_context_tokens)
    budget_s = (1 - LINK_SHARE) * seconds
    pool_tokens = max(pool_tokens_for(chunks) for chunks in wanted)
    ranks = min(SEVERAL, spec.num_experts)
    opened = partial(StageProbe, folder, spec, dtype, pool_tokens=pool_tokens, device=device)
    with closing(opened()) as probe:
        served = _served(probe, spec.max_context_tokens, pool_tokens)
        one = _rounds(probe, wanted, (1 - SEVERAL_SHARE) * budget_s)
    few = [chunks for chunks in one if count_tokens(chunks) <= MAX_SEVERAL_TOKENS][::2]
    with closing(opened(expert_ranks=ranks)) as probe:
        several = _rounds(probe, few, SEVERAL_SHARE * budget_s)
    return one, several, served


def _rounds(probe: StageProbe, wanted: Sequence[Chunks], budget_s: float) -> _Measured:
    start_s = monotonic_s()
    chosen = _affordable(probe, wanted, budget_s)
    measured: _Measured = {chunks: [] for chunks in chosen}
    for number in range(MAX_ROUNDS):  # batches in turn, so that a slow second affects all of them
        if number >= LEAST_ROUNDS and monotonic_s() - start_s > budget_s:
            break
        for chunks in chosen:
            measured[chunks].append(probe.run(chunks, seed=number % SEEDS))
    return measured


def _served(probe: StageProbe, longest: int, pool_tokens: int) -> list[ServingSample]:
    """Measure batches of prompts as one micro-batch and as two; the first round warms up."""
    samples = []
    for count, tokens in SERVED:
        lengths = [min(tokens, longest)] * count
        for micro_batches in (1, 2):
            if sum(lengths) > pool_tokens // 2 or micro_batches > count:
                continue
            seconds = [
                probe.serve(lengths, micro_batches=micro_batches, seed=number)
                for number in range(LEAST_ROUNDS + 1)
            ]
            ms = 1e3 * statistics.median(seconds[1:])
            label = f"{count} prompts of {lengths[0]} tokens, r1={micro_batches}"
            samples.append(ServingSample(label, micro_batches, count, sum(lengths), max(ms, 1e-3)))
    return samples


def _affordable(probe: StageProbe, wanted: Sequence[Chunks], budget_s: float) -> list[Chunks]:
    """Return the cheapest of `wanted` whose LEAST_ROUNDS rounds fit the budget after warm-up."""
    chosen: list[Chunks] = []
    spent_s = 0.0
    for chunks in wanted:
        start_s = monotonic_s()
        for seed in range(SEEDS):
            probe.run(chunks, seed=seed)
        seconds = monotonic_s() - start_s
        spent_s += 2 * seconds  # SEEDS passes now, LEAST_ROUNDS = SEEDS later
        if spent_s > budget_s and len(chosen) >= LEAST_ROUNDS:
            break
        chosen.append(chunks)
    return chosen


def _attention_samples(
    spec: ModelSpec, measured: _Measured, ranks: int = 1
) -> list[AttentionSample]:
    """Return the median of each batch and kind of layer."""
    samples = []
    for chunks, passes in measured.items():
        tasks = _tasks(passes, Stage.ATTENTION)
        for window in dict.fromkeys(spec.sliding_windows):
            times = [task.seconds for task in tasks if spec.sliding_windows[task.layer] == window]
            if times:
                ms = 1e3 * statistics.median(times)
                copies = statistics.fmean(one.copies for one in passes)
                label = label_of(chunks) + (f" to {ranks} ranks" if ranks > 1 else "")
                samples.append(AttentionSample(label, chunks, window, ms, ranks, copies))
    return samples


def _tasks(passes: Sequence[ProbedPass], stage: Stage) -> list[AttentionTask]:
    return [task for one in passes for task in one.attention if task.stage is stage]


def _expert_samples(measured: _Measured) -> list[ExpertSample]:
    samples = []
    for chunks, passes in measured.items():
        tasks = [task for one in passes for task in one.expert]
        active = statistics.median(task.active for task in tasks)
        pairs = statistics.median(task.pairs for task in tasks)
        ms = 1e3 * statistics.median(task.seconds for task in tasks)
        samples.append(ExpertSample(label_of(chunks), active, pairs, ms))
    return samples


def _shared(shape: ModelShape, measured: _Measured) -> tuple[SharedCost | None, list[Fit]]:
    samples = []
    for chunks, passes in measured.items():
        if tasks := _tasks(passes, Stage.SHARED):
            ms = 1e3 * statistics.median(task.seconds for task in tasks)
            samples.append(SizedSample(label_of(chunks), count_tokens(chunks), ms))
    if not samples:
        return None, []
    cost, fit = fit_shared(shape, samples)
    return cost, [fit]


def _measure_links(
    links_of: dict[str, tuple[str, str]], budget_s: float
) -> tuple[list[LinkCost], list[Fit]]:
    links, fits = [], []
    for backend, ends in links_of.items():
        sizes = dict(_link_medians(backend, ends, budget_s / len(links_of)))
        for direction, which in (("a2e", 0), ("e2a", 1)):
            samples = [
                SizedSample(f"{size} bytes", size, 1e3 * medians[which])
                for size, medians in sizes.items()
            ]
            cost, fit = fit_link(backend, "a2e" if direction == "a2e" else "e2a", samples)
            links.append(cost)
            fits.append(fit)
    return links, fits


def _link_medians(
    backend: str, ends: tuple[str, str], budget_s: float
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield (bytes, (a2e_s, e2a_s)) of each size; the first round warms up."""
    with link_probe(backend, ends) as probe:
        start_s = monotonic_s()
        rounds: list[list[LinkTransfer]] = []
        while len(rounds) <= LEAST_ROUNDS or (
            len(rounds) <= LINK_ROUNDS and monotonic_s() - start_s < budget_s
        ):
            rounds.append([probe.transfer(size) for size in LINK_BYTES])
    for index, size in enumerate(LINK_BYTES):
        transfers = [one[index] for one in rounds[1:]]
        a2e_s = statistics.median(transfer.a2e_s for transfer in transfers)
        yield size, (a2e_s, statistics.median(transfer.e2a_s for transfer in transfers))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_profile(hardware: Hardware) -> None:
    console = Terminal()
    console.print(f"{hardware.name}: {hardware.device}, {hardware.kind}")
    console.print(hardware.source, style="dim")
    headings = ("stage", "model (ms)", "points", "R²", "median error")
    table = plain_table(*headings, left=headings[:2])
    for fit in hardware.fits:
        error = f"{fit.median_error_fraction:.1%}" + (" (uncertain)" if fit.uncertain else "")
        row = (str(len(fit.points)), f"{fit.r2:.4f}", error)
        table.add_row(fit.stage, _formula(hardware, fit.stage), *row)
    console.print(table)
    if any(fit.uncertain for fit in hardware.fits):
        console.print(
            "uncertain: noise hid how times grow with size; profile again on an idle machine"
        )


def draw_profile(hardware: Hardware, path: Path) -> None:
    """Draw measured and modelled times over size. Raises ConfigError."""
    fits, columns = hardware.fits, 4
    rows = -(-len(fits) // columns)
    layout = {"nrows": rows, "ncols": columns, "figsize": (3.4 * columns, 3.0 * rows)}
    with saved_figure(path, "--plot", squeeze=False, **layout) as axes:
        for axis in axes.flat[len(fits) :]:
            axis.set_visible(False)
        for axis, fit in zip(axes.flat, fits, strict=False):
            _draw_fit(axis, fit)


def _draw_fit(axis: Any, fit: Fit) -> None:
    """Draw measured points and the model's line, over modelled times if the context varies."""
    from matplotlib.ticker import NullFormatter

    points = sorted(fit.points, key=lambda point: (point.size, point.modelled_ms))
    size = [point.size for point in points]
    measured_ms = [point.measured_ms for point in points]
    several = len(set(size)) < len(size)  # batches of one size differ in context
    x = [point.modelled_ms for point in points] if several else size
    lines = sorted(zip(x, (point.modelled_ms for point in points), strict=True))
    axis.loglog([a for a, _ in lines], [b for _, b in lines], color="#ee8636", linewidth=1.2)
    axis.loglog(x, measured_ms, "o", color="#3b75af", markersize=3.5)
    low, high = min(measured_ms), max(measured_ms)
    axis.set_ylim(low / 3, max(3 * high, 10 * low))  # at least a decade, so that flat looks flat
    for side in (axis.xaxis, axis.yaxis):
        side.set_minor_formatter(NullFormatter())  # powers of ten only: others would overlap
    axis.set(xlabel="modelled ms" if several else fit.size_unit, ylabel="ms")
    axis.set_title(f"{fit.stage}, R² {fit.r2:.4f}", fontsize=9)


def _formula(hardware: Hardware, stage: str) -> str:
    if stage == "attention":
        cost = hardware.attention
        return (
            f"{cost.call_ms:.3g} + {cost.sequence_ms:.2g}/sequence + "
            f"{1e9 * cost.linear_ms_per_flop:.3g}/GFLOP linear + "
            f"{1e9 * cost.attended_ms_per_flop:.3g}/GFLOP attended + "
            f"{1e6 * cost.context_ms_per_byte:.3g}/MB context + "
            f"{cost.prompt_call_ms:.2g}/call of prompts + {cost.decode_call_ms:.2g}/of decode + "
            f"{cost.packet_ms:.2g}/further rank + {1e6 * cost.copied_ms_per_byte:.2g}/MB copied"
        )
    if stage == "serving" and hardware.serving is not None:
        serving = hardware.serving
        return (
            f"{serving.batch_ms:.3g} + {serving.micro_batch_ms:.2g}/micro-batch + "
            f"{serving.sequence_ms:.2g}/sequence + {1e3 * serving.token_ms:.2g}/1000 tokens + "
            "logits"
        )
    if stage == "shared" and hardware.shared is not None:
        return f"{hardware.shared.call_ms:.3g} + {1e9 * hardware.shared.ms_per_flop:.3g}/GFLOP"
    if stage == "expert":
        expert = hardware.expert
        return (
            f"{expert.call_ms:.3g} + {expert.expert_ms:.3g}/expert + "
            f"{1e9 * expert.ms_per_flop:.3g}/GFLOP"
        )
    direction, _, backend = stage.partition(" ")
    for link in hardware.links:
        if (link.direction, link.backend) == (direction, backend):
            return f"{link.alpha_ms:.3g} + {1e6 * link.ms_per_byte:.3g}/MB"
    return ""
