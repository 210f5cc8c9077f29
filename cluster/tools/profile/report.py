"""Output of `tandem profile`: a table and a plot of the fits, and the routing report."""

from pathlib import Path
from typing import Any

from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.plots import saved_figure
from cluster.tools.profile.routing_profile import RoutingReport
from contracts.hardware import Fit, Hardware
from models.prediction.routing_profile import PREDICTOR_KINDS


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


def print_routing(report: RoutingReport) -> None:
    table = plain_table("layer", *PREDICTOR_KINDS)
    table.title = (
        "fraction of experts that guesses made in the layer before predict, on held-out text"
    )
    for precision in report.layers:
        found = (f"{precision.hit_fraction[kind]:.3f}" for kind in PREDICTOR_KINDS)
        table.add_row(str(precision.layer), *found)
    console = Terminal()
    console.print(f"{report.counts.counted} of {report.tokens} tokens counted")
    console.print(table)
