"""Output of `tandem bench`: tables, JSON and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cluster.observe.terminal import Terminal, plain_table
from cluster.tools.bench.bench import Bench
from cluster.tools.bench.workload import LatencyStats, LoadSummary
from cluster.tools.plots import pyplot, saving_figure
from contracts.errors import ConfigError

_ROWS = (
    ("time to first token", "ttft_ms"),
    ("time between tokens", "tbt_ms"),
    ("time per output token", "tpot_ms"),
    ("turnaround", "turnaround_ms"),
)


def as_json(found: Bench) -> dict[str, Any]:
    """Return the result without the single requests."""
    tree: dict[str, Any] = msgspec.to_builtins(found)
    del tree["outcomes"]
    return tree


def print_bench(found: Bench) -> None:
    terminal = Terminal(highlight=False)
    groups = {"all": found.all, **found.by_class}
    if found.retries is not None and found.retries.requests:
        groups["retries"] = found.retries
    if len(found.by_class) == 1:
        del groups["all"]
    for name, figures in groups.items():
        _print_figures(
            terminal, f"{found.model}, {name}" if len(groups) > 1 else found.model, figures
        )


def _print_figures(terminal: Terminal, title: str, figures: LoadSummary) -> None:
    table = plain_table(title, "mean ms", "p50", "p90", "p99", left=(title,))
    for label, field in _ROWS:
        spread: LatencyStats = getattr(figures, field)
        table.add_row(label, *map(_number, (spread.mean, spread.p50, spread.p90, spread.p99)))
    terminal.print(table)
    terminal.print(
        f"{figures.answered} of {figures.requests} requests answered in {figures.seconds:.1f} s: "
        f"{figures.requests_per_s:.2f} requests/s, {figures.tokens_per_s:.1f} tokens/s"
    )
    for error, count in figures.errors.items():
        detail = figures.detail.get(error)
        such = f", such as {detail}" if detail else ""
        terminal.print(f"  {count} x {error}{such}", markup=False)
    if figures.late_ms > 50.0:
        terminal.print(
            f"  sent up to {figures.late_ms:.0f} ms late: this client is the limit, not the server"
        )
    terminal.print()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def write_outcomes(found: Bench, path: Path) -> None:
    """Write the result with every request. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from None


def draw_bench(found: Bench, path: Path) -> None:
    """Draw the distribution of latencies and their course. Raises ConfigError."""
    plt = pyplot("--picture")
    figure, (shares, course) = plt.subplots(1, 2, figsize=(11, 3.6))
    good = [each for each in found.outcomes if not each.error]
    with saving_figure(figure, path, "--picture"):
        for label, times_s in (
            ("time to first token", [each.ttft_s for each in good]),
            ("time between tokens", [gap for each in good for gap in each.gaps_s]),
            ("turnaround", [each.turnaround_s for each in good]),
        ):
            ordered = sorted(1e3 * max(time_s, 1e-4) for time_s in times_s)
            if ordered:
                parts = [(place + 1) / len(ordered) for place in range(len(ordered))]
                shares.step(ordered, parts, where="post", label=label)
        shares.set(xscale="log", xlabel="ms", ylabel="share at most so long", ylim=(0, 1.01))
        shares.legend(fontsize=8)
        at_s = [each.arrival.at_s for each in good]
        course.plot(at_s, [1e3 * each.ttft_s for each in good], ".", ms=3, label="answered")
        failed = [each.arrival.at_s for each in found.outcomes if each.error]
        if failed:
            course.plot(failed, [0.0] * len(failed), "x", ms=4, label="refused or failed")
        course.set(xlabel="arrival, s", ylabel="time to first token, ms")
        course.legend(fontsize=8)
        figure.suptitle(f"{found.model}: {found.all.requests} requests", fontsize=10)
