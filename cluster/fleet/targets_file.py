"""The list of whom a Prometheus scrapes: where launchers keep it, and what stands in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from contracts.config import TandemConfig
from contracts.errors import ConfigError

SUFFIX: Final = "_service_discovery.json"
# A cluster that we start has a folder of another name each time; of others it is Ray's own.
LOCAL_TARGETS: Final = "/tmp/tandem-metrics"
RAY_SESSION: Final = "/tmp/ray/session_latest"
_PATH_LABEL: Final = "__metrics_path__"
_MAX_BYTES: Final = 1 << 20


class ListedTarget(msgspec.Struct, frozen=True):
    """As `file_sd_configs` has it."""

    targets: list[str]
    labels: dict[str, str]

    @property
    def rank(self) -> str:
        return self.labels.get("rank", ", ".join(self.targets))

    @property
    def urls(self) -> list[str]:
        return [f"http://{target}{self.labels.get(_PATH_LABEL, '')}" for target in self.targets]


_DECODER: Final = msgspec.json.Decoder(list[ListedTarget])


def targets_path(config: TandemConfig) -> Path | None:
    """Of the application of that name, as far as its launcher runs on this machine."""
    folders = [config.metrics.targets or LOCAL_TARGETS]
    folders += [] if config.metrics.targets else [RAY_SESSION]
    paths = (Path(folder) / f"{config.serve.name}{SUFFIX}" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def read_targets(path: Path) -> list[ListedTarget]:
    """Raises ConfigError: for a file that somebody else wrote, too, for whoever reads it sends its
    key there."""
    try:
        with path.open("rb") as file:
            owner, data = os.fstat(file.fileno()).st_uid, file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if owner not in (0, os.geteuid()):
        raise ConfigError(f"{path}: belongs to user {owner}, not to us: it may name anybody")
    try:
        if len(data) <= _MAX_BYTES:
            return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    raise ConfigError(f"{path}: is no list of targets of at most {_MAX_BYTES} bytes")
