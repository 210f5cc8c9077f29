"""Metrics of processes that are not ranks, and the launcher's list of all for Prometheus.

    tandem_service_discovery.json   for `file_sd_configs`, replaced atomically
    tandem.lock                     locked while the launcher lives

If another cluster of this machine uses the name, the launcher takes the next: tandem-2.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from ray.exceptions import RayError

from actors.telemetry.exporter import Exporter, ScrapeKey
from actors.telemetry.telemetry import Telemetry
from cluster.fleet.nodes import this_node
from cluster.fleet.rank_group import Member, RankGroup
from cluster.fleet.replies import ScrapeTarget
from cluster.fleet.targets_file import SUFFIX, targets_folder
from contracts.clock import Clock, monotonic_s
from contracts.config import TandemConfig
from contracts.logs import event

log = logging.getLogger("tandem.metrics")

LEASE_S = 15.0  # after the last registration
RETRY_S = 10.0  # after a failed write
MAX_NAMES = 100  # launchers with one name on a machine
_WILDCARDS = ("0.0.0.0", "[::]")


def discovery_entry(target: ScrapeTarget, cluster: str) -> dict[str, object]:
    """Return an entry for Prometheus. A wildcard host is replaced by the node's address."""
    where, _, path = target.address.partition("/")
    host, _, port = where.rpartition(":")
    labels = {
        "__metrics_path__": f"/{path}",
        "cluster": cluster,
        "group": target.group,
        "rank": target.rank,
        "node": target.node,
    }
    host = target.node if host in _WILDCARDS else host
    return {"targets": [f"{host}:{port}"], "labels": labels}


class TargetsFile:
    """File of one launcher. Never raises: failures do not affect serving."""

    def __init__(self, folder: Path, name: str, clock: Clock = monotonic_s) -> None:
        self._folder, self._name, self._clock = folder, name, clock
        self._written: list[dict[str, object]] | None = None
        self._retry_s = float("-inf")
        self._reason = ""
        self._lock: BinaryIO | None = None
        self.cluster = name

    @property
    def path(self) -> Path:
        return self._folder / f"{self.cluster}{SUFFIX}"

    def write(self, targets: Sequence[ScrapeTarget]) -> None:
        """Replace the file if the targets have changed."""
        if self._clock() < self._retry_s:
            return
        try:
            if self._written is not None and not self.path.exists():
                self.close()  # systemd clears /dev/shm of a user who logs out (RemoveIPC)
            if self._lock is None:
                self._lock, self._written = self._claim(), None
            entries = [discovery_entry(target, self.cluster) for target in targets]
            if entries != self._written:
                self._replace(msgspec.json.format(msgspec.json.encode(entries), indent=1))
                self._written = entries
        except OSError as error:
            self._retry_s = self._clock() + RETRY_S
            reason = error.strerror or str(error)
            if reason != self._reason:  # log once per reason
                path = self.path
                event(log, "scrape_targets_write_failed", logging.WARNING, path=path, reason=reason)
            self._reason = reason
        else:
            self._reason = ""

    def close(self) -> None:
        """Remove the file. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError), lock:
                if _has_name(lock):
                    self.path.unlink(missing_ok=True)
                    Path(lock.name).unlink(missing_ok=True)

    def _claim(self) -> BinaryIO:
        """Lock the first name that no live launcher has. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(self._folder)
        for number in range(1, MAX_NAMES):
            self.cluster = self._name if number == 1 else f"{self._name}-{number}"
            lock = _open_own(self._folder / f"{self.cluster}.lock", "rb+")
            if _is_locked(lock):
                return lock
            lock.close()
        raise OSError(0, f"{MAX_NAMES} launchers called {self._name} run here")

    def _replace(self, body: bytes) -> None:
        """Replace the file atomically; Prometheus may read it at any time."""
        beside = self.path.with_suffix(".new")
        beside.unlink(missing_ok=True)
        with _open_own(beside, "wb", os.O_EXCL) as file:
            file.write(body + b"\n")
        os.replace(beside, self.path)


def _open_own(path: Path, mode: str, flags: int = 0) -> BinaryIO:
    """Open or create a file without following links."""
    own = flags | os.O_CREAT | os.O_NOFOLLOW

    def opener(name: str, as_of_mode: int) -> int:
        return os.open(name, as_of_mode | own, 0o644)

    return cast(BinaryIO, open(path, mode, opener=opener))


def _is_locked(lock: BinaryIO) -> bool:
    """Lock the file; return whether it still has its name, which a previous owner may remove."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _has_name(lock)


def _has_name(lock: BinaryIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
    return False


def _remove_stale(folder: Path) -> None:
    """Remove files of launchers that were killed."""
    for path in folder.glob("*.lock"):
        with contextlib.suppress(OSError), path.open("rb+") as lock:
            if _is_locked(lock):
                path.with_name(f"{path.stem}{SUFFIX}").unlink(missing_ok=True)
                path.unlink()


class ScrapeTargets:
    """Scrape targets: ranks, the launcher, and registered processes.

    `lease` is thread-safe; the supervisor's thread calls `update`.
    """

    def __init__(self, config: TandemConfig, file: TargetsFile, clock: Clock = monotonic_s) -> None:
        self._config, self._file, self._clock = config, file, clock
        self._own: list[ScrapeTarget] = []
        self._exporter: Exporter | None = None
        self._ranks: dict[str, ScrapeTarget] = {}  # by address
        self._leased: dict[str, tuple[ScrapeTarget, float]] = {}  # by address; until when
        self._guard = threading.Lock()  # of what is leased

    def open(self, telemetry: Telemetry) -> None:
        """Export the launcher's metrics."""
        key, node = ScrapeKey(self._config.http), this_node()
        self._exporter = Exporter(telemetry, key=key, name="launcher")
        address = self._exporter.open(self._config.metrics.host or node.listen_host)
        if address:
            name = "launcher"
            self._own = [ScrapeTarget(address=address, group=name, rank=name, node=node.host)]

    def lease(self, target: ScrapeTarget) -> None:
        """Include the target for the next LEASE_S."""
        with self._guard:
            self._leased[target.address] = (target, self._clock() + LEASE_S)

    def update(self, groups: Sequence[RankGroup]) -> None:
        """List the current ranks, except those being replaced."""
        ranks = {
            member.ready.metrics_address: member
            for group in groups
            for member in group.members
            if member.ready.metrics_address and not member.replacement_reason
        }
        try:
            self._ranks = {
                address: self._ranks.get(address) or _target(member)
                for address, member in ranks.items()
            }
        except RayError as error:  # retried in the next round
            event(log, "rank_node_unknown", logging.WARNING, error=error)
            return
        self._file.write([*self._own, *self._ranks.values(), *self._still_leased()])

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self._file.close()

    def _still_leased(self) -> list[ScrapeTarget]:
        now_s = self._clock()
        with self._guard:
            self._leased = {a: lease for a, lease in self._leased.items() if lease[1] > now_s}
            return [target for target, _ in self._leased.values()]


def create_scrape_targets(config: TandemConfig) -> ScrapeTargets | None:
    """Return the launcher's scrape targets on its node, or None if exporters are off."""
    if not config.metrics.exporters:
        return None
    return ScrapeTargets(config, TargetsFile(targets_folder(config), config.serve.name))


def _target(member: Member) -> ScrapeTarget:
    """Return the target of a rank. Raises RayError."""
    return ScrapeTarget(
        address=member.ready.metrics_address,
        group=member.spec.group,
        rank=member.name,
        node=member.place.node.host,
    )


RENEW_S = 5.0

RegisterTarget = Callable[[ScrapeTarget], Awaitable[None]]  # Groups' `export`


class MetricsEndpoint:
    """Exporter of an ingress or bulk job, on its event loop.

    Failures are logged and do not affect the process.
    """

    def __init__(
        self,
        config: TandemConfig,
        telemetry: Telemetry,
        group: str,
        name: str,
        register: RegisterTarget,
    ) -> None:
        """Create the endpoint. register: registers the target with the launcher."""
        self._config, self._group, self._name = config, group, name
        self._register = register
        self._telemetry = telemetry
        self._exporter: Exporter | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen, and register with the launcher periodically until closed."""
        if not self._config.metrics.exporters:
            return
        try:
            node = await asyncio.to_thread(this_node)
        except (OSError, RayError) as error:
            event(log, "exporter_failed", logging.WARNING, name=self._name, reason=error)
            return
        key, loop = ScrapeKey(self._config.http), asyncio.get_running_loop()
        self._exporter = Exporter(self._telemetry, key=key, name=self._name, loop=loop)
        host = self._config.metrics.host or node.listen_host
        address = await asyncio.to_thread(self._exporter.open, host)
        if not address:
            return
        own_target = ScrapeTarget(
            address=address, group=self._group, rank=self._name, node=node.host
        )
        self._renewal = asyncio.create_task(self._renew_lease(own_target))

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)

    async def _renew_lease(self, target: ScrapeTarget) -> None:
        while True:
            try:
                await self._register(target)
            except RayError as error:  # a new launcher will follow, or this process ends too
                event(log, "launcher_notify_failed", logging.WARNING, name=self._name, reason=error)
            await asyncio.sleep(RENEW_S)
