"""What `tandem profile` shows: a table of the fits, and a picture of points and lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from cluster.files.pictures import check_format, pyplot, saved
from cluster.files.terminal import Terminal
from contracts.hardware import Fit, Hardware

OPTION = "--plot"


def print_profile(hardware: Hardware) -> None:
    console = Terminal()
    console.print(f"{hardware.name}: {hardware.device}, {hardware.kind}")
    console.print(hardware.source, style="dim")
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "model (ms)", "points", "R²", "median error"):
        table.add_column(heading, justify="left" if heading in ("stage", "model (ms)") else "right")
    for fit in hardware.fits:
        row = (str(len(fit.points)), f"{fit.r2:.4f}", f"{fit.median_error_fraction:.1%}")
        table.add_row(fit.stage, _formula(hardware, fit.stage), *row)
    console.print(table)


def draw_profile(hardware: Hardware, path: Path) -> None:
    """Measured against modelled times, and both over size. Raises ConfigError."""
    check_format(path, OPTION)
    plt = pyplot(OPTION)
    fits = hardware.fits
    columns = 4
    rows = -(-len(fits) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 3.0 * rows), squeeze=False)
    with saved(figure, path, OPTION):
        for axis in axes.flat[len(fits) :]:
            axis.set_visible(False)
        for axis, fit in zip(axes.flat, fits, strict=False):
            _draw_fit(axis, fit)
    plt.close(figure)


def _draw_fit(axis: Any, fit: Fit) -> None:
    """Points are measured, the line is the model; a model of several sizes is drawn by rank."""
    from matplotlib.ticker import NullFormatter

    points = sorted(fit.points, key=lambda point: (point.size, point.modelled_ms))
    size = [point.size for point in points]
    several = len(set(size)) < len(size)  # batches of one size differ in context
    x = [point.modelled_ms for point in points] if several else size
    lines = sorted(zip(x, (point.modelled_ms for point in points), strict=True))
    axis.loglog([a for a, _ in lines], [b for _, b in lines], color="#ee8636", linewidth=1.2)
    axis.loglog(x, [point.measured_ms for point in points], "o", color="#3b75af", markersize=3.5)
    low, high = (
        min(point.measured_ms for point in points),
        max(point.measured_ms for point in points),
    )
    axis.set_ylim(low / 3, max(3 * high, 10 * low))  # a decade at least: flat is to look flat
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
