"""Declaration of `tandem`'s commands and of the options that set configuration keys.

Wrong arguments are errors of one line.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from cluster.serving.settings import with_absolute_paths
from contracts.config import TandemConfig
from contracts.loading import load_config

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


def add_config_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", help='Hugging Face model folder, or "bundled"')
    add("--dtype", choices=("auto", "bfloat16", "float32"))
    for group in ("attention", "expert", "prefill"):
        add(f"--{group}-ranks", type=int, metavar="N")
    add("--config", type=Path, help="YAML or TOML file")
    add("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")

    add("--served-model-name", metavar="M", help="name of the model for clients")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="default info")
    add("--name", help='of the application on its Ray cluster (default "tandem")')


def config_from_options(options: argparse.Namespace) -> TandemConfig:
    """Load the file, then apply --set, then the named options."""
    named = {
        "model.path": options.model,
        "model.name": options.served_model_name,
        "serve.name": options.name,
        "log.level": options.log_level,
        "model.dtype": options.dtype,
        "groups.attention_ranks": options.attention_ranks,
        "groups.expert_ranks": options.expert_ranks,
        "groups.prefill_ranks": options.prefill_ranks,
        "http.host": getattr(options, "host", None),
        "http.port": getattr(options, "port", None),
        "http.api_keys": getattr(options, "api_key", None),
        "http.tls_certificate": getattr(options, "ssl_certfile", None),
        "http.tls_key": getattr(options, "ssl_keyfile", None),
        "http.root_path": getattr(options, "root_path", None),
    }
    extra = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return with_absolute_paths(load_config(options.config, [*options.set, *extra]), Path.cwd())
