"""JSON files written by people; an error is one line that names the field."""

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from contracts.errors import ConfigError

MAX_BYTES = 8 << 20
Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r"`\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the object in `path`. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{str(path)!r}: not a file name") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, which no such file needs")
    try:
        tree = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


def struct_from(tree: object, kind: type[Body], where: str) -> Body:
    """Convert `tree` to `kind`. where: its name in messages. Raises ConfigError."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_named(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def wrong_field(message: str) -> tuple[str, str]:
    """Split "Expected `int`, got `str` - at `$.n`" into ("n", "Expected `int`, got `str`")."""
    path, missing = _PATH.search(message), _MISSING.search(message)
    parts = (path[1] if path else "", missing[1] if missing else "")
    text = "missing" if missing else message.partition(" - at ")[0]
    return ".".join(filter(None, parts)), text


def _named(message: str) -> str:
    field, text = wrong_field(message)
    text = text.replace("`", "")
    return f"{field}: {text[0].lower()}{text[1:]}" if field else text
