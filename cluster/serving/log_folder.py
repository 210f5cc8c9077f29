"""Log folders: one per run, kept after it; old ones are removed.

$XDG_STATE_HOME/tandem/NAME/20260131-120000-5f09c2/ serve.log ingress.log groups.log
                                                    attention-0.log … ray/ (Ray's own)
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from contracts.config import TandemConfig
from contracts.errors import ConfigError
from contracts.logs import event

LOCK = "running"
MAX_RAY_FILE_BYTES = 1 << 20  # kept from the end of each Ray log


log = logging.getLogger(f"tandem.{__name__}")


@contextlib.contextmanager
def log_folder(config: TandemConfig, environment: Mapping[str, str]) -> Iterator[TandemConfig]:
    """Yield `config` with a new log.folder, locked while in use.

    Older runs of the name are removed except the latest log.runs. Without log.folder, a user whose
    home cannot be written (a container's) gets no log files. Raises ConfigError if log.folder
    cannot be written.
    """
    name = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{secrets.token_hex(3)}"
    parent = state_folder(environment) / config.serve.name
    if config.log.folder is not None:
        parent = Path(config.log.folder)
    folder = parent / name
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        if config.log.folder is None:
            reason = str(error.strerror)
            event(log, "no_log_folder", logging.WARNING, folder=str(parent), reason=reason)
            yield config
            return
        raise ConfigError(
            f"log.folder={parent}: cannot be written: {error.strerror}; name another "
            "(--set log.folder=DIR)"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _prune(parent, config.log.runs)
        settings = msgspec.structs.replace(config.log, folder=str(folder))
        yield msgspec.structs.replace(config, log=settings)


def keep_ray_logs(session: Path, folder: Path) -> None:
    """Copy the ends of Ray's log files, which vanish with the cluster."""
    to = folder / "ray"
    for path in sorted((session / "logs").glob("*.*")):
        with contextlib.suppress(OSError):
            if path.is_file() and (size := path.stat().st_size):
                to.mkdir(exist_ok=True, mode=0o700)
                with path.open("rb") as source:
                    source.seek(max(0, size - MAX_RAY_FILE_BYTES))
                    (to / path.name).write_bytes(source.read(MAX_RAY_FILE_BYTES))


def state_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's folder of files that outlive a run."""
    state = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path("/", state, "tandem")  # below "/~", which cannot be written, without a home


def _prune(parent: Path, keep: int) -> None:
    """Remove all but the latest runs. Folders without a lock, or locked ones, stay."""
    runs = sorted((one for one in parent.iterdir() if (one / LOCK).is_file()), reverse=True)
    for run in runs[keep:]:
        with contextlib.suppress(OSError), (run / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run, ignore_errors=True)
