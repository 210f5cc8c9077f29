"""Pictures of measured timelines (matplotlib, from the `bench` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from contracts.events import Stage, TaskSpan

_COLOURS = ("#3b75af", "#ee8636", "#519d3e", "#8d69b8")  # by micro-batch; readable on white
_STAGES = {
    Stage.ATTENTION: "attention",
    Stage.A2E: "A2E",
    Stage.EXPERT: "experts",
    Stage.E2A: "E2A",
}


def draw_gantt(spans: Sequence[TaskSpan], layers: range, title: str, path: Path) -> None:
    """One row per stage (two for links, token groups apart), coloured by micro-batch."""
    shown = [span for span in spans if span.layer in layers and span.stage in _STAGES]
    zero_s = min(span.start_s for span in shown)
    figure, axes = plt.subplots(figsize=(11, 2.9))
    for row, stage in enumerate(_STAGES):
        for span in (span for span in shown if span.stage is stage):
            start_ms, width_ms = (span.start_s - zero_s) * 1e3, (span.end_s - span.start_s) * 1e3
            groups = stage in (Stage.A2E, Stage.E2A)
            height = 0.36 if groups else 0.8
            bottom = row - 0.4 + (0.42 * span.token_group if groups else 0.0)
            colour = _COLOURS[span.micro_batch % len(_COLOURS)]
            axes.broken_barh(
                [(start_ms, max(width_ms, 0.15))],
                (bottom, height),
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
            if stage in (Stage.ATTENTION, Stage.EXPERT) and width_ms > 6:
                axes.text(
                    start_ms + width_ms / 2, row, f"L{span.layer}", ha="center", va="center",
                    fontsize=7, color="white",
                )  # fmt: skip
    axes.set_yticks(range(len(_STAGES)), list(_STAGES.values()))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, loc="left")
    micro_batches = sorted({span.micro_batch for span in shown})
    handles = [Patch(color=_COLOURS[m % len(_COLOURS)], label=f"m{m}") for m in micro_batches]
    axes.legend(
        handles=handles, title="micro-batch", fontsize=7, title_fontsize=7, loc="upper right"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
