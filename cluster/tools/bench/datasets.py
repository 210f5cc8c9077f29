"""Files that `tandem bench` replays: traces of arrivals and lengths, and conversations."""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TextIO, TypeVar

import msgspec

from contracts.errors import ConfigError

MAX_ROWS: Final = 1_000_000
MAX_TOKENS: Final = 1 << 20  # of a prompt or an answer
_MAX_CHARS: Final = 1 << 30
_MAX_LINE_CHARS: Final = 1 << 22
_Row = TypeVar("_Row")
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Lengths(NamedTuple):
    """Tokens of the prompt and of the output, 1 or more. prompt: 0 for a given text."""

    prompt: int
    output: int


class TraceRow(NamedTuple):
    """at_s: after the first row. hash_ids: equal ids are equal blocks of the prompts."""

    at_s: float
    lengths: Lengths
    hash_ids: tuple[int, ...] = ()


class Turn(NamedTuple):
    """Messages since the last answer. answer: as recorded; empty if there is none."""

    messages: list[dict[str, Any]]
    answer: str


class _AzureRow(msgspec.Struct):
    at: datetime = msgspec.field(name="TIMESTAMP")
    prompt: _Length = msgspec.field(name="ContextTokens")
    output: _Length = msgspec.field(name="GeneratedTokens")


class _MooncakeRow(msgspec.Struct):
    at_ms: float = msgspec.field(name="timestamp")
    prompt: _Length = msgspec.field(name="input_length")
    output: _Length = msgspec.field(name="output_length")
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, block_tokens: int) -> list[TraceRow]:
    """Read the rows in order of time: Azure's .csv or Mooncake's .jsonl, perhaps with .gz.

    block_tokens: of each hash id. Raises ConfigError.
    """

    def parse(row: Any) -> TraceRow:
        if ".csv" in path.suffixes:
            azure = msgspec.convert(row, _AzureRow, strict=False)
            lengths = Lengths(max(1, azure.prompt), max(1, azure.output))
            return TraceRow(azure.at.replace(tzinfo=UTC).timestamp(), lengths)
        found = msgspec.convert(row, _MooncakeRow)
        blocks = -(-found.prompt // block_tokens)
        if found.hash_ids and len(found.hash_ids) != blocks:
            raise ValueError(
                f"{len(found.hash_ids)} hash_ids, but input_length {found.prompt} is {blocks} "
                f"blocks of {block_tokens} tokens; correct one, or give --block-tokens"
            )
        lengths = Lengths(max(1, found.prompt), max(1, found.output))
        return TraceRow(found.at_ms / 1e3, lengths, found.hash_ids)

    rows = [row for _, row in _rows("--trace", path, (".csv", ".jsonl"), parse)]
    if not rows:
        raise ConfigError(f"--trace {path}: has no rows")
    rows.sort(key=lambda row: row.at_s)
    return [row._replace(at_s=row.at_s - rows[0].at_s) for row in rows]


def read_conversations(path: Path, most: int) -> tuple[list[list[Turn]], list[int]]:
    """Read up to `most` conversations, and the numbers of rows left out as no user speaks.

    Rows are ShareGPT's, lists of messages, or prompts: .json is one list, .jsonl has one in each
    line, .txt a prompt; each perhaps with .gz. Raises ConfigError.
    """
    found: list[list[Turn]] = []
    left_out: list[int] = []
    for number, turns in _rows("--conversations", path, (".json", ".jsonl", ".txt"), _turns):
        if turns:
            found.append(turns)
        else:
            left_out.append(number)
        if len(found) == most:
            break
    if not found:
        reason = f"row {left_out[0]}: has no turn of a user" if left_out else "has no rows"
        raise ConfigError(f"--conversations {path}: {reason}; give conversations or prompts")
    return found, left_out


_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    **{role: role for role in ("user", "assistant", "system", "developer")},
}


def _turns(row: Any) -> list[Turn]:
    """Split a conversation behind each answer; answers before the first user are left out."""
    fields = row if isinstance(row, dict) else {"prompt": row}
    messages = fields.get("conversations", fields.get("messages"))
    if isinstance(fields.get("prompt"), str):
        messages = [{"role": "user", "content": fields["prompt"]}]
    if not isinstance(messages, list):
        raise ValueError("give a list in conversations or messages, or a string in prompt")
    turns = [Turn([], "")]
    is_answered = False
    for role, content in map(_message, messages):
        if role == "assistant":
            is_answered = _has_user(turns[-1])
            turns[-1] = turns[-1]._replace(answer=content if isinstance(content, str) else "")
            continue
        if is_answered:
            turns.append(Turn([], ""))
            is_answered = False
        turns[-1].messages.append({"role": role, "content": content})
    return [turn for turn in turns if _has_user(turn)]


def _has_user(turn: Turn) -> bool:
    return any(message["role"] == "user" for message in turn.messages)


def _message(message: Any) -> tuple[str, Any]:
    fields = message if isinstance(message, dict) else {}
    role = _ROLES.get(str(fields.get("from", fields.get("role"))))
    content = fields.get("value", fields.get("content"))
    if role is None:
        raise ValueError(f"give each message a role (from) of {', '.join(_ROLES)}")
    if not isinstance(content, str | list) and role != "assistant":
        raise ValueError(f"give the message of {role} its text in content (value)")
    return role, content


def _rows(
    option: str, path: Path, endings: tuple[str, ...], parse: Callable[[Any], _Row]
) -> Iterator[tuple[int, _Row]]:
    """Yield numbered rows, parsed. Raises ConfigError; parse may raise ValueError."""
    ending = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if ending not in endings:
        raise ConfigError(f"{option} {path}: end its name in {' or '.join(endings)} (.gz)")
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 1
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for row in _READERS[ending](file):
                if number > MAX_ROWS:
                    raise ValueError(f"at most {MAX_ROWS} rows are read; shorten the file")
                if row is not None:
                    yield number, parse(row)
                number += 1
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{option} {path}: cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path}: not UTF-8: {error.reason}") from None
    except (ValueError, msgspec.DecodeError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{option} {path}: row {number}: {error}") from None


def _lines(file: TextIO) -> Iterator[str]:
    total = 0
    while line := file.readline(_MAX_LINE_CHARS):
        total += len(line)
        if len(line) == _MAX_LINE_CHARS or total > _MAX_CHARS:
            raise ValueError(f"over {_MAX_LINE_CHARS} characters, or {_MAX_CHARS} in all; shorten")
        yield line


# at import: msgspec crashes if two threads create a type's first decoder at once
_decode_list = msgspec.json.Decoder(list[Any]).decode


def _json_list(file: TextIO) -> Iterable[Any]:
    text = file.read(_MAX_CHARS + 1)
    if len(text) > _MAX_CHARS:
        raise ValueError(f"the file has over {_MAX_CHARS} characters; shorten it")
    return _decode_list(text)


# Each returns the rows, None for an empty line.
_READERS: Final[dict[str, Callable[[TextIO], Iterable[Any]]]] = {
    ".csv": lambda file: csv.DictReader(_lines(file)),
    ".json": _json_list,
    ".jsonl": lambda file: (
        msgspec.json.decode(line) if line.strip() else None for line in _lines(file)
    ),
    ".txt": lambda file: (line.strip() or None for line in _lines(file)),
}
