"""What a soak has shown: JSON, a Markdown table, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.soak.traffic import HonestAnswer, Tally
from benchmarks.soak.verdict import MINUTE_S, growth_fraction, windows
from benchmarks.soak.watch import Sample, Told, Watch

MIB = 1 << 20
MOST_POINTS = 180  # of a curve that is kept
QUANTILES = (50, 95, 99)


def condensed(points: Sequence[Any]) -> list[Any]:
    """At most MOST_POINTS of them, the last one among them."""
    step = -(-len(points) // MOST_POINTS) or 1
    return list(points[len(points) % step - 1 if len(points) % step else step - 1 :: step])


def latencies_ms(honest: Sequence[HonestAnswer], start_s: float) -> list[list[float]]:
    """Per minute that had answers: the minute, how many, p50, p95 and p99."""
    by_minute: dict[int, list[float]] = {}
    for answer in honest:
        by_minute.setdefault(int((answer.at_s - start_s) // MINUTE_S), []).append(answer.took_s)
    return [
        [minute, len(took), *(round(1000 * quantile(took, percent)) for percent in QUANTILES)]
        for minute, took in sorted(by_minute.items())
    ]


def quantile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def samples_of(watch: Watch, tally: Tally, start_s: float) -> dict[str, Any]:
    return {
        "processes": {
            role: {
                "at_s": [sample.at_s for sample in some],
                "rss_mib": [round(sample.rss_bytes / MIB, 1) for sample in some],
                "descriptors": [sample.descriptors for sample in some],
                "threads": [sample.threads for sample in some],
            }
            for role, samples in watch.samples.items()
            for some in [condensed(samples)]
        },
        "ray_rss_mib": [size // MIB for size in condensed(watch.ray_rss_bytes)],
        "kv_blocks": msgspec.to_builtins(condensed(watch.told)),
        "honest_ms_per_minute": latencies_ms(tally.honest, start_s),
    }


def table(
    watch: Watch, start: dict[str, Sample], tally: Tally, total_s: float, told: tuple[Told, Told]
) -> str:
    """Markdown: a row per process, then the clients, then the blocks."""
    early, late = windows(total_s)
    lines = [
        f"| process | memory MiB, minutes {_minutes(early)} | minutes {_minutes(late)} | growth"
        " | descriptors start, most, end | threads start, most, end |",
        "|---|---|---|---|---|---|",
    ]
    for role, samples in watch.samples.items():
        sizes = [_median_mib(samples, window) for window in (early, late)]
        lines.append(
            f"| {role} | {sizes[0]:.0f} | {sizes[1]:.0f} | {growth_fraction(samples, total_s):+.1%}"
            f" | {start[role].descriptors}, {max(s.descriptors for s in samples)},"
            f" {samples[-1].descriptors}"
            f" | {start[role].threads}, {max(s.threads for s in samples)}, {samples[-1].threads} |"
        )
    took = [answer.took_s for answer in tally.honest] or [0.0]
    ms = ", ".join(f"p{percent} {1000 * quantile(took, percent):.0f}" for percent in QUANTILES)
    lines += ["", "| clients | came | what became of them |", "|---|---|---|"]
    for kind, outcomes in tally.outcomes.items():
        became = ", ".join(f"{outcome} {count:,}" for outcome, count in outcomes.most_common(9))
        lines.append(f"| {kind} | {sum(outcomes.values()):,} | {became} |")
    lines += ["", f"Honest answers in ms: {ms}."]
    for rank, states in told[1].blocks.items():
        lines.append(
            f"KV blocks of {rank} at the end: {_blocks(states)} of {_blocks_all(told, rank)}."
        )
    return "\n".join(lines) + "\n"


def _minutes(window: tuple[float, float]) -> str:
    return " to ".join(f"{edge / MINUTE_S:.3g}" for edge in window)


def _median_mib(samples: Sequence[Sample], window: tuple[float, float]) -> float:
    inside = [s.rss_bytes for s in samples if window[0] <= s.at_s <= window[1]]
    return statistics.median(inside or [samples[-1].rss_bytes]) / MIB


def _blocks(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _blocks_all(told: tuple[Told, Told], rank: str) -> int:
    return sum(told[0].blocks.get(rank, {}).values())


def picture(watch: Watch, tally: Tally, start_s: float, path: Path) -> None:
    """Memory, descriptors, KV blocks and latencies over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    memory, descriptors, blocks, latency = figure.subplots(4, 1, sharex=True)
    for role, samples in watch.samples.items():
        some = condensed(samples)
        at = [sample.at_s / MINUTE_S for sample in some]
        memory.plot(at, [sample.rss_bytes / MIB for sample in some], label=role, lw=1)
        descriptors.plot(at, [sample.descriptors for sample in some], label=role, lw=1)
    for rank in watch.told[0].blocks:
        for state in ("used", "cached"):
            some = [told for told in condensed(watch.told) if rank in told.blocks]
            at = [told.at_s / MINUTE_S for told in some]
            counts = [told.blocks[rank].get(state, 0) for told in some]
            blocks.plot(at, counts, label=f"{rank} {state}", lw=1)
    rows = latencies_ms(tally.honest, start_s)
    for number, percent in enumerate(QUANTILES):
        values = [row[2 + number] for row in rows]
        latency.plot([row[0] + 0.5 for row in rows], values, label=f"p{percent}", lw=1)
    for axes, name in (
        *((memory, "resident MiB"), (descriptors, "descriptors"), (blocks, "KV blocks")),
        (latency, "honest answers, ms"),
    ):
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7, ncols=4, loc="lower right")
    latency.set_xlabel("minutes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
