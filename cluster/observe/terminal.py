"""Console on standard output or standard error."""

from collections.abc import Container

from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """Console that lets `main` handle a broken pipe: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def plain_table(*headings: str, left: Container[str] = ()) -> Table:
    """Return a table without lines. left: the headings of left-aligned columns."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table
