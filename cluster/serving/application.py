"""A named Tandem application on a Ray cluster: a Serve application of two deployments.

Other applications may run beside it and are not touched. They share no route: clients use the
ingress's own port, not Serve's proxy.
"""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from cluster.fleet.adoption import kill_orphans
from cluster.serving.serve_app import build_serve_app
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.logs import event

log = logging.getLogger("tandem.serving")

STOP_TIMEOUT_S = 6.0
STATUS_PERIOD_S = 2.0  # `serve.status` takes a tenth of a second of a core, here and in Serve
QUIET = {"enable_access_log": False, "log_level": "WARNING"}
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class DeployedApp(NamedTuple):
    """An application deployed by this process.

    launch_id: distinguishes it from others of its name.
    """

    name: str
    launch_id: str
    groups: DeploymentHandle


def groups_handle(name: str) -> DeploymentHandle:
    """Return the handle of the Groups deployment, whether or not it exists."""
    return serve.get_deployment_handle("Groups", name)


def ingress_handle(name: str) -> DeploymentHandle:
    return serve.get_deployment_handle("Ingress", name)


def check_absent(name: str) -> None:
    """Raise ResourceError if the cluster has an application of this name."""
    found = serve.status().applications.get(name)
    if found is not None:
        raise ResourceError(
            f"serve.name={name}: an application of this name is on the Ray cluster already "
            f"({found.status}); give this one another (--name OTHER, and another --port), or end "
            f"that one first (tandem stop --name {name})"
        )


def check_present(name: str) -> None:
    """Raise ResourceError, with the existing names, unless the cluster has this application."""
    known = serve.status().applications
    if name not in known:
        known_names = f"there are: {', '.join(known)}" if known else "there is none at all"
        raise ResourceError(f"no application {name} on the Ray cluster; {known_names}")


def deploy(config: TandemConfig) -> DeployedApp:
    """Start the application without waiting. `remove` ends it, also after an error of Serve."""
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    name, launch_id = config.serve.name, secrets.token_hex(8)
    application = build_serve_app(config, launch_id)
    target = serve.RunTarget(application, name=name, route_prefix=None, logging_config=QUIET)
    try:
        serve.run_many([target], wait_for_applications_running=False)
    except BaseException:
        remove(DeployedApp(name, launch_id, groups_handle(name)), is_clusters_end=False)
        raise
    return DeployedApp(name, launch_id, groups_handle(name))


def wait_for_reply(deployed: DeployedApp, method: str, timeout_s: float, what: str) -> Any:
    """Return a reply of Groups.

    Raises LaunchError as soon as Serve reports a failed deployment, or at the limit, naming `what`.
    """
    response = getattr(deployed.groups, method).remote()
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return response.result(timeout_s=STATUS_PERIOD_S)
        except TimeoutError:
            check_deployed(deployed)
        except RayError as error:
            check_deployed(deployed)
            raise LaunchError(f"Groups of {deployed.name}: {extract_reason(str(error))}") from None
        if time.monotonic() > end_s:
            raise LaunchError(f"{what} within {timeout_s:g} s (groups.ready_timeout_s)")


def check_deployed(deployed: DeployedApp) -> None:
    """Raise the reason that the application cannot start.

    It is the error reported by its ingress, else the last line of Serve's status.
    """
    found = serve.status().applications.get(deployed.name)
    if found is None:
        raise LaunchError(
            f"somebody else has removed the application {deployed.name} from the Ray cluster"
        )
    failed = [one for one in found.deployments.values() if one.status in _FAILED]
    if found.status in _FAILED or failed:
        text = "\n".join(one.message for one in (*failed, found) if one.message)
        raise LaunchError(f"a deployment of {deployed.name} failed: {extract_reason(text)}")


def extract_reason(text: str) -> str:
    """Return the line with the reason from one or several tracebacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    error_lines = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (error_lines or lines or ["Serve does not say why"])[-1][:500]


def remove(deployed: DeployedApp, *, is_clusters_end: bool) -> None:
    """End the ranks in order and remove the application, if it is still the deployed one.

    Serve itself and other applications remain. Raises nothing, so that the original error is kept.
    """
    try:
        if (
            deployed.groups.launch_id.remote().result(timeout_s=STOP_TIMEOUT_S)
            != deployed.launch_id
        ):
            event(log, "application_replaced", logging.WARNING, name=deployed.name)
            return
    except Exception as error:  # noqa: BLE001 - a name in use must not be deployed again
        event(log, "application_unreachable", logging.WARNING, name=deployed.name, error=error)
    end(deployed.name, is_clusters_end=is_clusters_end)


def end(name: str, *, is_clusters_end: bool) -> None:
    """End the ranks and remove the application, also if another process deployed it."""
    _warn(
        "graceful_stop_failed",
        lambda: groups_handle(name).close.remote().result(timeout_s=STOP_TIMEOUT_S),
    )
    if not is_clusters_end:
        _warn("application_delete_failed", lambda: serve.delete(name))
        _warn("orphan_cleanup_failed", lambda: kill_orphans(name))


def _warn(name: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - reported; the next step may still succeed
        event(log, name, logging.WARNING, error=error)
