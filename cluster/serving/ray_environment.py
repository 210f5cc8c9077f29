"""What Ray reads from the environment, some of it when it is imported: so this imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import msgspec

from cluster.fleet.targets_file import LOCAL_TARGETS
from contracts.config import TandemConfig

_ALWAYS = {
    # Else a call that comes after the end of a cluster would quietly start another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_DEDUP_LOGS": "0",  # what two ranks say is not the same because it is alike
}


def cluster_address(config: TandemConfig, environment: Mapping[str, str]) -> str | None:
    """The existing cluster to join; None: a local one is to be started."""
    address = config.groups.address or environment.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def with_targets(config: TandemConfig, environment: Mapping[str, str]) -> TandemConfig:
    """With the folder in which a Prometheus finds whom to scrape, where the cluster has none that
    is known beforehand."""
    if config.metrics.targets is not None or cluster_address(config, environment) is not None:
        return config
    metrics = msgspec.structs.replace(config.metrics, targets=LOCAL_TARGETS)
    return msgspec.structs.replace(config, metrics=metrics)


def prepare_ray_environment(environment: MutableMapping[str, str], *, has_terminal: bool) -> None:
    """What every command wants of Ray. What is set already stays."""
    for name, value in _ALWAYS.items():
        environment.setdefault(name, value)
    if not has_terminal:
        environment.setdefault("RAY_COLOR_PREFIX", "0")


def prepare_cluster_environment(
    config: TandemConfig, environment: MutableMapping[str, str]
) -> None:
    """A cluster of our own takes tokens: Ray listens on all interfaces, whatever its address, and
    runs code for whoever may connect. An existing one says itself whether it does."""
    if cluster_address(config, environment) is None:
        environment.setdefault("RAY_AUTH_MODE", "token")
