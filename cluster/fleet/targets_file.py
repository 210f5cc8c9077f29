"""Location and format of the launcher's list of Prometheus targets."""

import os
from pathlib import Path
from typing import Final

import msgspec

from contracts.config import TandemConfig
from contracts.errors import ConfigError

SUFFIX: Final = "_service_discovery.json"
# Not below /tmp: services of systemd, such as a packaged Prometheus, have a /tmp of their own.
DEFAULT_FOLDER: Final = "/dev/shm/tandem-metrics"
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


def targets_folder(config: TandemConfig) -> Path:
    return Path(config.metrics.targets or DEFAULT_FOLDER)


def targets_path(config: TandemConfig) -> Path | None:
    """Return the file of the configured application, if its launcher runs on this machine."""
    path = targets_folder(config) / f"{config.serve.name}{SUFFIX}"
    return path if path.is_file() else None


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
