"""The connection to Ray: an existing cluster, or a local one of our own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping

import ray

from contracts.config import TandemConfig
from contracts.errors import ResourceError

OBJECT_STORE_BYTES = 256 << 20  # nothing large goes through it
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
    Raises ResourceError if the cluster at groups.address (or RAY_ADDRESS) does not answer.
    """
    address = config.groups.address or environment.get("RAY_ADDRESS")
    if address:
        _connect(address, show_rank_logs)
    else:
        _start_local(config, show_rank_logs)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str, show_rank_logs: bool) -> None:
    try:
        ray.init(address=address, log_to_driver=show_rank_logs, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"no Ray cluster answers at {address} (groups.address or RAY_ADDRESS): {first} "
            "[with token authentication, set RAY_AUTH_MODE=token]"
        ) from None


def _start_local(config: TandemConfig, show_rank_logs: bool) -> None:
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder = tempfile.mkdtemp(prefix="tandem-", dir="/tmp") if os.path.isdir("/tmp") else None
    needed = config.groups.cpus_per_rank * (
        config.groups.attention_ranks + config.groups.expert_ranks
    )
    cores = os.cpu_count() or 1
    if needed > cores:
        raise ResourceError(
            f"groups: {config.groups.attention_ranks} attention and {config.groups.expert_ranks} "
            f"expert ranks of {config.groups.cpus_per_rank:g} CPUs need {needed:g}, this machine "
            f"has {cores}; use fewer ranks or lower groups.cpus_per_rank"
        )
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=show_rank_logs,
        logging_level="ERROR",
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
