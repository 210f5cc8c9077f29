"""Environment of Ray, part of which is read on import: this module does not import Ray."""

from collections.abc import Mapping, MutableMapping

from contracts.config import TandemConfig

_ALWAYS = {
    # Otherwise a call after the end of a cluster would start another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_DEDUP_LOGS": "0",  # similar lines of two ranks are not duplicates
}


def cluster_address(config: TandemConfig, environment: Mapping[str, str]) -> str | None:
    """Return the address of the existing cluster to join, or None to start a local one."""
    address = config.groups.address or environment.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def prepare_ray_environment(environment: MutableMapping[str, str], *, has_terminal: bool) -> None:
    """Set Ray's environment for every command. Existing values are kept."""
    for name, value in _ALWAYS.items():
        environment.setdefault(name, value)
    if not has_terminal:
        environment.setdefault("RAY_COLOR_PREFIX", "0")


def prepare_cluster_environment(
    config: TandemConfig, environment: MutableMapping[str, str]
) -> None:
    """Enable tokens on a local cluster: Ray listens on all interfaces and executes code."""
    if cluster_address(config, environment) is None:
        environment.setdefault("RAY_AUTH_MODE", "token")
