"""Location and format of the launcher's list of Prometheus targets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from contracts.config import TandemConfig
from contracts.errors import ConfigError

SUFFIX: Final = "_service_discovery.json"
# A local cluster has a new folder each time; for other clusters it is Ray's own.
LOCAL_TARGETS: Final = "/tmp/tandem-metrics"
RAY_SESSION: Final = "/tmp/ray/session_latest"
_PATH_LABEL: Final = "__metrics_path__"
_MAX_BYTES: Final = 1 << 20


class ListedTarget(msgspec.Struct, frozen=True):
    """Entry of `file_sd_configs`."""

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
    """Return the file of the configured application, if its launcher runs on this machine."""
    folders = [config.metrics.targets or LOCAL_TARGETS]
    folders += [] if config.metrics.targets else [RAY_SESSION]
    paths = (Path(folder) / f"{config.serve.name}{SUFFIX}" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def read_targets(path: Path) -> list[ListedTarget]:
    """Read a list of targets.

    Raises ConfigError, also for a file of another user: readers send their key to its targets.
    """
    try:
        with path.open("rb") as file:
            owner, data = os.fstat(file.fileno()).st_uid, file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if owner not in (0, os.geteuid()):
        raise ConfigError(f"{path}: belongs to user {owner}, whose targets are not trusted")
    try:
        if len(data) <= _MAX_BYTES:
            return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    raise ConfigError(f"{path}: is not a list of targets of at most {_MAX_BYTES} bytes")
