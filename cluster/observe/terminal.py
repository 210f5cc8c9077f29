"""The terminal, or whatever standard output is."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """Leaves it to `main` to end when whoever reads us has left: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError
