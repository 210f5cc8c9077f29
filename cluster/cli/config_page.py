"""Generator of docs/configuration.md: `python -m cluster.cli.config_page`."""

import inspect
from itertools import groupby
from pathlib import Path

from cluster.cli.config_table import ConfigKey, config_keys, format_value, sections
from contracts.config import TandemConfig
from contracts.device_modes import MODES, Mode

TARGET = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
_HEAD = """# Configuration

All settings, with default, accepted values and meaning. This page is generated from the fields in
`contracts/config.py` (`python -m cluster.cli.config_page`); `tandem config` prints the same for one
configuration.

A configuration is one YAML or TOML file with these sections. `--set section.key=value` overrides a
setting, a named option such as `--model` overrides both, and the rest have their defaults. Unknown
keys and values out of bounds are rejected; the error names the nearest known key. Relative paths
are relative to the current folder. "–" is `null`: not set.
"""
_MODES = "The test of each mode on a device. The others are refused when the device is known."
_ROW = "| `{}` | {} | {} | {} |"


def page() -> str:
    kinds = {name: kind.cls for name, kind in sections()}
    parts = [_HEAD]
    for section, keys in groupby(
        config_keys(TandemConfig()), lambda key: key.key.partition(".")[0]
    ):
        parts += [
            "",
            f"## `{section}`",
            "",
            " ".join((inspect.getdoc(kinds[section]) or "").split()),
        ]
        parts += ["", "| key | default | takes | meaning |", "|---|---|---|---|"]
        parts += map(_row, keys)
    parts += ["", "## Modes by device", "", _MODES, "", "| mode | cpu | cuda |", "|---|---|---|"]
    for mode in MODES:
        parts.append(f"| `{mode.setting}` | {_cell(mode, 'cpu')} | {_cell(mode, 'cuda')} |")
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _cell(mode: Mode, device: str) -> str:
    tested = mode.cuda if device == "cuda" else mode.cpu
    return f"`{tested}`" if tested else f"refused: {mode.instead}"


def _row(key: ConfigKey) -> str:
    name = key.key.partition(".")[2]
    default = format_value(key.default) or '""'
    if name.endswith("_bytes") and key.default >= 1 << 20:
        default += f" ({key.default >> 20} MiB)"
    return _ROW.format(name, default, key.takes, key.meaning.replace("|", "\\|"))


def main() -> None:
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
