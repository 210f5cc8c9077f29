"""The connection to Ray: an existing cluster, or a local one of our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping

import ray

from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError

OBJECT_STORE_BYTES = 256 << 20  # nothing large goes through it
PROBE_TIMEOUT_S = 3.0
_HTTP2_SETTINGS = b"\x04"  # the type of the frame that either side sends first
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0" * 5
LOCAL_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's default is 15: on a busy machine ranks would starve
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


@contextlib.contextmanager
def ray_session(
    config: TandemConfig, environment: Mapping[str, str], *, show_rank_logs: bool
) -> Iterator[None]:
    """Inside, this process is connected to Ray. A local cluster ends with it, an existing one not.

    show_rank_logs: what ranks write to standard error (loading progress, warnings) appears here.
    Raises ResourceError if the cluster at groups.address (or RAY_ADDRESS) does not answer, and
    LaunchError if a local one does not start.
    """
    address = cluster_address(config, environment)
    if address is not None:
        _connect(address, environment, show_rank_logs)
        try:
            yield
        finally:
            ray.shutdown()
        return
    check_cores(config)
    folder = tempfile.mkdtemp(prefix="tandem-", dir="/tmp" if os.path.isdir("/tmp") else None)
    try:
        _start_local(folder, show_rank_logs)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)  # Ray's sockets and logs


def cluster_address(config: TandemConfig, environment: Mapping[str, str]) -> str | None:
    """The existing cluster to join; None: a local one is to be started."""
    address = config.groups.address or environment.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def _probe(address: str, environment: Mapping[str, str]) -> None:
    """Raises OSError unless host:port speaks HTTP/2, as Ray's gRPC does. Ray itself tries for
    minutes, whoever else listens there."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return  # a name such as "auto"
    with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as sock:
        if environment.get("RAY_USE_TLS") == "1":
            return
        sock.sendall(_HTTP2_HELLO)
        answer = sock.recv(4)
        if answer[3:] != _HTTP2_SETTINGS:
            raise OSError("what listens there is not Ray")


def _connect(address: str, environment: Mapping[str, str], show_rank_logs: bool) -> None:
    try:
        _probe(address, environment)
        ray.init(address=address, log_to_driver=show_rank_logs, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"no Ray cluster answers at {address} (groups.address or RAY_ADDRESS): {first} "
            "[with token authentication, set RAY_AUTH_MODE=token]"
        ) from None


def check_cores(config: TandemConfig) -> None:
    """Raises ResourceError if a local cluster could not hold the ranks."""
    groups = config.groups
    needed = groups.cpus_per_rank * groups.ranks
    cores = os.cpu_count() or 1
    if needed > cores:
        raise ResourceError(
            f"groups: {groups.attention_ranks} attention, {groups.expert_ranks} expert and "
            f"{groups.prefill_ranks} prefill ranks of {groups.cpus_per_rank:g} CPUs need "
            f"{needed:g}, this machine has {cores}; "
            "use fewer ranks or lower groups.cpus_per_rank"
        )


def _start_local(folder: str, show_rank_logs: bool) -> None:
    """Raises LaunchError."""
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=show_rank_logs,
            logging_level="ERROR",
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # noqa: BLE001 - what Ray raises if one of its processes is late
        first = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"the local Ray cluster did not start: {first} [on an overloaded machine: start again]"
        ) from None
