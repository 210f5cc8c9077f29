"""What the commands of `tandem` have in common: how they are declared, and how wrong arguments are
told: one line, with the nearest option or command."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]
else:
    Commands = Any

EXIT_ERROR = 2
EXIT_UNRECOVERABLE = 3  # of a server that has served, and can no more: start it again
Run = Callable[[argparse.Namespace, MutableMapping[str, str]], int]


class Parser(argparse.ArgumentParser):
    """Its errors are one line and exit status 2."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing is unknown and goes on: argparse would tell of it without the command's name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(EXIT_ERROR, f"{self.prog}: error: {line}{self._nearest(line)}\n")

    def _nearest(self, message: str) -> str:
        """What may have been meant by the first word that is none of ours."""
        if not message.startswith(("unrecognized", "argument COMMAND: invalid choice")):
            return f"; see {self.prog} --help"
        words = re.findall(r"--?[\w-]+", message) or re.findall(r"'([^']*)'", message)
        known = [name for action in self._actions for name in action.option_strings]
        known += [name for action in self._actions for name in action.choices or ()]
        near = difflib.get_close_matches(words[0], known, n=1, cutoff=0.5) if words else []
        return f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"


def add_command(
    commands: Commands, name: str, help_: str, example: str, run: Run
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help_,
        description=help_,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def version() -> str:
    """Of what is installed; in a checkout that is not, of nothing."""
    try:
        return importlib.metadata.version("tandem-moe")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: a checkout"


def pretty(value: Any) -> str:
    """JSON for people and machines."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()
