"""Pictures by matplotlib (extra `bench`), with one-line errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, writing
from contracts.traces import TRANSFERS, Stage, TaskSpan

FORMATS = (".png", ".svg", ".pdf")


def pyplot(path: Path, option: str) -> Any:
    """Return matplotlib.pyplot without a display.

    Raises ConfigError if it is not installed, or `path` does not end in a known picture format.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{option} {path}: end its name in one of {', '.join(FORMATS)}")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            f"{option}: needs matplotlib: in a clone, pip install -e '.[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def saved_figure(path: Path, option: str, **layout: Any) -> Iterator[Any]:
    """Yield the axes of a figure, of `pyplot.subplots`; then write and close it.

    Raises ConfigError.
    """
    plt = pyplot(path, option)
    figure, axes = plt.subplots(**layout)
    yield axes
    with writing(option, path):
        figure.tight_layout()
        figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


_COLOURS = ("#3b75af", "#ee8636", "#519d3e", "#8d69b8")  # by micro-batch; readable on white
_ROWS = {
    Stage.ATTENTION: 0,
    Stage.SHARED: 0,  # on the same rank, hatched
    Stage.A2E: 1,
    Stage.EXPERT: 2,
    Stage.E2A: 3,
}
_LABELS = ("attention", "A2E", "experts", "E2A")
_LEAST_WIDTH = 1.5e-3  # of the picture: minimum of a bar
_LABELLED_WIDTH = 0.04  # of the picture: minimum of a bar with a label
_GROUP_ROWS = 2  # token groups alternate between rows, so that neighbours differ


def draw_gantt(
    spans: Sequence[TaskSpan], layers: range, title: str, path: Path, option: str = "--picture"
) -> None:
    """Draw one row per stage, two for links, coloured by micro-batch; shared experts are hatched.

    Raises ConfigError, naming `option`.
    """
    shown = [span for span in spans if span.layer in layers and span.stage in _ROWS]
    zero_s = min(span.start_s for span in shown)
    whole_ms = (max(span.end_s for span in shown) - zero_s) * 1e3
    with saved_figure(path, option, figsize=(11, 2.9)) as axes:
        for span in shown:
            _draw_span(axes, span, zero_s, whole_ms)
        axes.set_yticks(range(len(_LABELS)), list(_LABELS))
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=10, loc="left")
        _draw_legend(axes, shown)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _draw_span(axes: Any, span: TaskSpan, zero_s: float, whole_ms: float) -> None:
    start_ms, width_ms = (span.start_s - zero_s) * 1e3, (span.end_s - span.start_s) * 1e3
    row, link = _ROWS[span.stage], span.stage in TRANSFERS
    height = 0.36 if link else 0.8
    bottom = row - 0.4 + (0.42 * (span.token_group % _GROUP_ROWS) if link else 0.0)
    axes.broken_barh(
        [(start_ms, max(width_ms, _LEAST_WIDTH * whole_ms))],
        (bottom, height),
        facecolor=_COLOURS[span.micro_batch % len(_COLOURS)],
        edgecolor="white",
        linewidth=0.4,
        hatch="///" if span.stage is Stage.SHARED else None,
    )
    if not link and width_ms > _LABELLED_WIDTH * whole_ms:
        middle_ms = start_ms + width_ms / 2
        axes.text(
            middle_ms, row, f"L{span.layer}", ha="center", va="center", fontsize=7, color="white"
        )


def _draw_legend(axes: Any, shown: Sequence[TaskSpan]) -> None:
    from matplotlib.patches import Patch

    micro_batches = sorted({span.micro_batch for span in shown})[: len(_COLOURS)]
    handles = [Patch(color=_COLOURS[m % len(_COLOURS)], label=f"m{m}") for m in micro_batches]
    axes.legend(
        handles=handles, title="micro-batch", fontsize=7, title_fontsize=7, loc="upper right"
    )
