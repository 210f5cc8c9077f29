"""Hardware profiles by file, by the name of a bundled one, or by their fields."""

from pathlib import Path
from typing import Any

import msgspec

from contracts.errors import ConfigError, writing
from contracts.hardware import Hardware
from contracts.json_input import read_json_file, struct_from

_FOLDER = Path(__file__).resolve().parent / "hardware_files"


def known_hardware() -> list[str]:
    """Return the names of the bundled hardware files."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_hardware(given: str | dict[str, Any]) -> Hardware:
    """Load a hardware profile. Raises ConfigError."""
    if isinstance(given, dict):
        return struct_from(given, Hardware, "hardware")
    if given in known_hardware():
        return struct_from(read_json_file(_FOLDER / f"{given}.json"), Hardware, given)
    path = Path(given).expanduser()
    try:
        missing = not path.is_file()
    except (OSError, ValueError):
        missing = True
    if missing:
        raise ConfigError(
            f"hardware: {given!r} is no file and no known name ({', '.join(known_hardware())}); "
            "`tandem profile --output FILE` writes one"
        )
    return struct_from(read_json_file(path), Hardware, str(path))


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a hardware profile. Raises ConfigError if `path` cannot be written."""
    body = msgspec.json.format(msgspec.json.encode(hardware), indent=1)
    with writing("--output", path):
        path.write_bytes(body + b"\n")
