"""Commands in README.md and in the pages for users."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    *("README.md", "docs/usage.md", "docs/sizing.md", "docs/kubernetes.md"),
    *(f"docs/operations/{page}.md" for page in ("run", "secure", "observe", "scale", "repair")),
)
PROGRAMS = (
    *("tandem", "python", "pip", "curl", "ray", "serve", "make", "git", "export", "cat", "lm_eval"),
    *(
        "kubectl",
        "docker",
        "helm",
        "promtool",
        "prometheus",
        "sysctl",
        "ip",
        "ethtool",
        "systemd-run",
    ),
)
LANGUAGES = ("python", "yaml", "toml", "json")  # a block of these is one piece, and no command

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TICKED = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(rf"(?:[A-Z][A-Za-z_]*=\S+ )*({'|'.join(PROGRAMS)})(?= )")
_REMARK = re.compile(r"\s{2,}(?:#.*|\(.*\))$")  # remark after a command


class Command(NamedTuple):
    """text: on one line, without remarks. A block in another language: its text, `language` set."""

    document: str
    line: int
    text: str
    language: str = ""


def documented() -> list[Command]:
    return [command for document in DOCUMENTS for command in _of_document(document)]


def _of_document(document: str) -> Iterator[Command]:
    whole = (ROOT / document).read_text(encoding="utf-8")
    for block in _BLOCK.finditer(whole):
        line = whole[: block.start()].count("\n") + 2
        if block[1] in LANGUAGES:
            yield Command(document, line, block[2], block[1])
        else:
            yield from (Command(document, line, text) for text in commands_of(block[2]))
    blanked = _BLOCK.sub(lambda found: "\n" * found[0].count("\n"), whole)
    for number, text in enumerate(blanked.splitlines(), 1):
        for ticked in _TICKED.finditer(text):
            if _COMMAND.match(ticked[1]):
                yield Command(document, number, ticked[1])


def commands_of(block: str) -> list[str]:
    """The commands of a block: what begins with a program's name, with `$ ` before it or not, up to
    the end of its line, or of the line where its quotes end. Everything else is output."""
    commands, lines = [], iter(block.splitlines())
    for line in lines:
        text = _REMARK.sub("", line.removeprefix("$ "))
        if not _COMMAND.match(text):
            continue
        while text.endswith("\\") or text.count("'") % 2:
            text = text.removesuffix("\\").rstrip() + " " + _REMARK.sub("", next(lines).strip())
        commands.append(text)
    return commands
