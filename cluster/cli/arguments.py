"""Declaration of `tandem`'s commands, and one-line errors for wrong arguments."""

import argparse
import difflib
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]
else:
    Commands = Any

EXIT_ERROR = 2
Run = Callable[[argparse.Namespace, MutableMapping[str, str]], int]


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line with exit status 2."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Reject unknown arguments here: argparse would report them without the command's name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(EXIT_ERROR, f"{self.prog}: error: {line}{self._nearest(line)}\n")

    def _nearest(self, message: str) -> str:
        """Return a hint: the known option or command nearest to the first unknown word."""
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


def pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
