"""A picture of one token's way through an attention and an expert rank that keeps some of its
experts: attention, packets, hints, reads, experts.

    python -m benchmarks.offloaded_picture --picture docs/images/offloaded_token.svg

Real processes and reads, a core each; of the tokens of a run the one that took as long as most do.
Spans are the ranks' own; the end of a read is when its rank looked for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.offloaded_decode import BUNDLED, texts
from benchmarks.offloaded_ranks import PROMPT, Ranks
from benchmarks.offloading_rank import AHEAD, DEMANDED, HINT, RECORD
from cluster.tools.plots import pyplot, saving_figure
from contracts.traces import Stage, TaskSpan
from models.spec.model import ModelSpec
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import check_checkpoint

_CALL_S: Final = 30.0
ROWS: Final = ("attention", "A2E", "hint", "reads", "experts", "E2A")
_ROW_OF: Final = {
    Stage.ATTENTION.value: 0, Stage.SEND.value: 0, Stage.FINISH.value: 0, Stage.A2E.value: 1,
    HINT: 2, AHEAD: 3, DEMANDED: 3, Stage.EXPERT.value: 4, Stage.E2A.value: 5,
}  # fmt: skip
_COLOUR_OF: Final = {AHEAD: "#519d3e", DEMANDED: "#c44e52", HINT: "#519d3e"}
_COLOUR, _TOLD_FROM = "#3b75af", 0.03  # of the picture: from which width on a bar has its layer


class Bar(NamedTuple):
    what: str
    layer: int
    start_s: float
    end_s: float


async def measured(spec: ModelSpec, options: argparse.Namespace, folder: str) -> list[Bar]:
    """Of the token whose layers took as long as the median."""
    slots = max(spec.top_k, round(options.kept * len(spec.moe_layers) * spec.num_experts))
    settings = [f"experts.slots={slots}", "experts.direct_io=true", f"prefill.host_store={folder}"]
    path = Path(folder) / "record.jsonl"
    os.environ[RECORD] = str(path)
    ranks = Ranks("ahead, best", settings, options.times, options.backend)
    await ranks.join()
    try:
        for ids in texts(Tokenizer.load(BUNDLED), 3, PROMPT):
            await ranks.generate(ids, options.tokens)
        called = [process.call("spans") for process in ranks.processes]
        spans: list[TaskSpan] = [span for each in called for span in each.result(_CALL_S)]
    finally:
        await ranks.close()
    recorded = [Bar(*json.loads(line)) for line in path.read_text().splitlines()]
    return of_one_token(spans, recorded, spec.num_layers)


def of_one_token(spans: Sequence[TaskSpan], recorded: Sequence[Bar], layers: int) -> list[Bar]:
    """recorded: reads and hints, of all tokens."""
    batches: defaultdict[int, list[TaskSpan]] = defaultdict(list)
    for span in spans:
        if span.stage.value in _ROW_OF and span.tokens <= 1:
            batches[span.batch].append(span)
    whole = {
        batch: max(span.end_s for span in few) - min(span.start_s for span in few)
        for batch, few in batches.items()
        if {s.layer for s in few if s.stage is Stage.EXPERT} >= set(range(layers))
    }
    usual = statistics.median_low(list(whole.values())[len(whole) // 3 :])
    chosen = batches[next(batch for batch, spent_s in whole.items() if spent_s == usual)]
    start_s, end_s = min(s.start_s for s in chosen), max(s.end_s for s in chosen)
    bars = [Bar(span.stage.value, span.layer, span.start_s, span.end_s) for span in chosen]
    return bars + [bar for bar in recorded if bar.end_s > start_s and bar.start_s < end_s]


def draw(bars: Sequence[Bar], title: str, path: Path) -> None:
    """Raises ConfigError, naming the option."""
    from matplotlib.patches import Patch

    plt = pyplot("--picture")
    own = [bar for bar in bars if bar.what not in _COLOUR_OF]
    start_s, end_s = min(bar.start_s for bar in own), max(bar.end_s for bar in own)
    figure, axes = plt.subplots(figsize=(11, 3.4))
    with saving_figure(figure, path, "--picture"):
        reads = 0
        for bar in sorted(bars, key=lambda each: each.start_s):
            lane = None  # two are under way at once: they lie in turns
            if bar.what in (AHEAD, DEMANDED):
                reads, lane = reads + 1, reads % 2
            _draw_bar(axes, bar, lane, start_s, 1e3 * (end_s - start_s))
        axes.set_yticks(range(len(ROWS)), list(ROWS))
        axes.set_ylim(len(ROWS) - 0.4, -0.6)
        axes.set_xlim(0.0, 1e3 * (end_s - start_s))
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=10, loc="left")
        handles = [Patch(color=_COLOUR_OF[what], label=what) for what in (AHEAD, DEMANDED)]
        axes.legend(
            handles=handles, fontsize=7, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0)
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    plt.close(figure)


def _draw_bar(axes: Any, bar: Bar, lane: int | None, zero_s: float, whole_ms: float) -> None:
    start_ms, width_ms = 1e3 * (bar.start_s - zero_s), 1e3 * (bar.end_s - bar.start_s)
    row = _ROW_OF[bar.what]
    bottom, height = (row - 0.38, 0.76) if lane is None else (row - 0.38 + 0.4 * lane, 0.36)
    axes.broken_barh(
        [(start_ms, max(width_ms, 1.5e-3 * whole_ms))],
        (bottom, height),
        facecolor=_COLOUR_OF.get(bar.what, _COLOUR),
        edgecolor="white",
        linewidth=0.4,
        alpha=0.8,
    )
    if width_ms > _TOLD_FROM * whole_ms or bar.what == HINT:
        white = bar.what != HINT
        axes.text(
            start_ms + width_ms / 2,
            bottom + height / 2,
            f"L{bar.layer}",
            ha="center" if white else "left",
            va="center",
            fontsize=7,
            color="white" if white else "black",
            clip_on=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", type=Path, required=True, metavar="FILE", help="FILE.svg")
    parser.add_argument("--tokens", type=int, default=64, help="generated in each of three texts")
    parser.add_argument("--kept", type=float, default=0.25)
    parser.add_argument("--times", type=int, default=4, help="how large experts are read")
    parser.add_argument("--backend", choices=("shm", "tcp"), default="shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        bars = asyncio.run(measured(check_checkpoint(BUNDLED), options, folder))
    title = (
        f"Measured: a token of the bundled model, {options.kept:.0%} of its experts kept, "
        f"experts x{options.times}, a core per rank, {options.backend}"
    )
    draw(bars, title, options.picture)


if __name__ == "__main__":
    main()
