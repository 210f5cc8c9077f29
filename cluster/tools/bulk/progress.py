"""Progress of a job: a bar on a terminal, periodic lines in a log."""

import asyncio
from collections import deque

from rich.progress import BarColumn, Progress, TextColumn

from actors.telemetry.telemetry import Telemetry, Totals
from cluster.observe.terminal import Terminal
from cluster.tools.bulk.records import RowOutcome, RowRejection
from contracts import metrics
from contracts.clock import monotonic_s
from contracts.metrics import Pipeline

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.5
RATE_OVER_S = 30.0


class RowTally:
    """Counts of this run and of earlier ones. expected_rows: estimate for the whole job."""

    def __init__(self) -> None:
        self.rows = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.expected_rows: float | None = None
        self._recent: deque[tuple[float, int, int]] = deque([(monotonic_s(), 0, 0)])
        self._rows_now = self._tokens_now = self._cached_now = 0
        self._answered_now = self._rejected_now = 0

    def found(self, rows: int, prompt_tokens: int, cached_tokens: int) -> None:
        """Add rows of an earlier run."""
        self.rows += rows
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def done(self, answers: list[RowOutcome]) -> None:
        self.rows += len(answers)
        self._rows_now += len(answers)
        for answer in answers:
            if not isinstance(answer, RowRejection):
                self.prompt_tokens += answer.prompt_tokens
                self.cached_tokens += answer.cached_tokens
                self._tokens_now += answer.prompt_tokens
                self._cached_now += answer.cached_tokens
                self._answered_now += 1
            else:
                self._rejected_now += 1

    def rejected(self, rows: int) -> None:
        self.rows += rows
        self._rejected_now += rows

    def show(self, telemetry: Telemetry) -> None:
        """Register this run's counts, read at each scrape."""
        telemetry.read_each(metrics.BULK_ROWS, self._rows_by_outcome)
        telemetry.read(metrics.BULK_EXPECTED_ROWS, of=lambda: self.expected_rows or 0)
        telemetry.read(metrics.PROMPT_TOKENS, Pipeline.PREFILL, of=lambda: self._tokens_now)
        telemetry.read(metrics.CACHED_TOKENS, Pipeline.PREFILL, of=lambda: self._cached_now)

    def _rows_by_outcome(self) -> Totals:
        return {("answered",): self._answered_now, ("rejected",): self._rejected_now}

    def rates(self) -> tuple[float, float]:
        """Return rows and prompt tokens per second over the last half minute."""
        now_s = monotonic_s()
        self._recent.append((now_s, self._rows_now, self._tokens_now))
        while now_s - self._recent[0][0] > RATE_OVER_S and len(self._recent) > 2:
            self._recent.popleft()
        since_s, rows, tokens = self._recent[0]
        seconds = max(now_s - since_s, 1e-9)
        return (self._rows_now - rows) / seconds, (self._tokens_now - tokens) / seconds

    def line(self) -> str:
        rows_per_s, tokens_per_s = self.rates()
        cached = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        of = f" of about {self.expected_rows:,.0f}" if self.expected_rows is not None else ""
        left = ""
        if self.expected_rows is not None and rows_per_s > 0:
            left = f", {duration(max(0.0, self.expected_rows - self.rows) / rows_per_s)} left"
        return (
            f"{self.rows:,}{of} rows, {rows_per_s:,.0f} rows/s, {tokens_per_s:,.0f} tokens/s, "
            f"{cached:.0%} cached{left}"
        )


async def show(tally: RowTally, console: Terminal) -> None:
    """Show the progress until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            console.print(tally.line(), soft_wrap=True, highlight=False)
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)
        while True:
            total = tally.expected_rows
            bar.update(task, completed=tally.rows, total=total, description=tally.line())
            bar.refresh()
            await asyncio.sleep(BAR_EVERY_S)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
