"""The report of a run, written after each fault: what is cut off leaves one too."""

import time
from pathlib import Path
from typing import Any, TextIO

from benchmarks.harness import RESULTS, Result, write_result
from benchmarks.robustness import verdict
from benchmarks.robustness.clients import WRONG
from benchmarks.robustness.run import Run


class Report:
    """output: a JSON file (None: benchmarks/results/chaos.json); the table is beside it, as .md.
    console: for the progress bar."""

    def __init__(self, settings: dict[str, str], output: Path | None, console: TextIO) -> None:
        self._settings, self._output, self._console = settings, output, console

    def after_fault(self, run: Run) -> None:
        self.write(run, (), is_whole=False)
        self._print(run)

    def write(self, run: Run, left: tuple[str, ...], *, is_whole: bool = True) -> dict[str, Any]:
        """The summary. left: what is there after the end, in words. is_whole: the run has
        ended."""
        summary = verdict.summary(run, left)
        summary["ended"] = is_whole
        samples = verdict.waits(run.done, run.clients.streams)
        result = Result(
            name="chaos", kind="measured", settings=self._settings, samples=samples, summary=summary
        )
        path = self._output or RESULTS / "chaos.json"
        write_result(result, path.with_suffix(".part")).replace(path)  # it may be cut off here
        path.with_suffix(".md").write_text(verdict.table(run) + "\n", encoding="utf-8")
        return summary

    def _print(self, run: Run) -> None:
        done, all_of_them = len(run.done), len(run.faults)
        passed_s = time.monotonic() - run.began_s
        left_s = passed_s / done * (all_of_them - done)
        wrong = sum(one.how in WRONG for one in run.clients.outcomes) + len(run.wrong)
        summary = f"{len(run.clients.outcomes)} answers, {wrong} wrong, {left_s / 60:.0f} min left"
        last = run.done[-1].fault.label
        line = f"{done} of {all_of_them} faults, {summary}, last: {last}"
        end = "\r" if self._console.isatty() and done < all_of_them else "\n"
        print(f"{line:<119}", end=end, file=self._console, flush=True)
