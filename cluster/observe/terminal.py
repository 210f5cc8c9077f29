"""Console on standard output or standard error."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """Console that lets `main` handle a broken pipe: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError
