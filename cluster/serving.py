"""`tandem serve`: checks, starts, waits until every pipeline serves, stops in order."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.codec import Directory, decode_directory
from cluster.front import bind
from cluster.model_folder import resolve_model_folder
from cluster.ray_session import cluster_address, ray_session
from cluster.serve_app import APP_NAME, build_serve_app
from contracts.config import TandemConfig
from contracts.errors import ConfigError, LaunchError
from models.checkpoint import check_checkpoint

log = logging.getLogger("tandem.serving")

STOP_TIMEOUT_S = 6.0
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


class Served(NamedTuple):
    """A server that answers. `groups` is the handle of the Groups deployment."""

    url: str
    directory: Directory
    groups: DeploymentHandle
    ready_s: float


@contextlib.contextmanager
def serving(config: TandemConfig, *, show_rank_logs: bool = False) -> Iterator[Served]:
    """The whole server, ready inside and gone afterwards. Raises TandemError, one line each."""
    started_s = time.monotonic()
    _check_http(config)
    preflight(config)
    with ray_session(config, os.environ, show_rank_logs=show_rank_logs):
        try:
            directory, groups = _deploy(config)
            url = f"http://{_url_host(config.http.host)}:{config.http.port}"
            _wait_healthy(url, config.groups.ready_timeout_s)
            yield Served(url, directory, groups, time.monotonic() - started_s)
        finally:
            _stop(is_ours=cluster_address(config, os.environ) is None)


def _check_http(config: TandemConfig) -> None:
    """Raises ConfigError for what only a server that listens itself cannot do."""
    if config.http.front != "direct":
        raise ConfigError(
            f"http.front={config.http.front} is for `serve run`; tandem serve listens itself: "
            "use direct"
        )
    if config.http.port == 0:
        raise ConfigError("http.port=0: clients must know the port; choose one (--port)")


def preflight(config: TandemConfig) -> None:
    """What can be found wrong in milliseconds, before anything starts. Raises TandemError."""
    model = check_checkpoint(resolve_model_folder(config.model.path))
    if config.groups.expert_ranks > model.num_experts:
        raise ConfigError(
            f"groups.expert_ranks={config.groups.expert_ranks}: the model has "
            f"{model.num_experts} experts per layer; use at most that many ranks"
        )
    bind(config.http.host, config.http.port, reuse_port=False).close()


def _deploy(config: TandemConfig) -> tuple[Directory, DeploymentHandle]:
    """Starts Serve without a proxy of its own, and waits for the ranks."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="Disabled",
        logging_config=QUIET,
    )
    target = serve.RunTarget(
        build_serve_app(config), name=APP_NAME, route_prefix="/", logging_config=QUIET
    )
    serve.run_many([target], wait_for_applications_running=False)
    groups = serve.get_deployment_handle("Groups", APP_NAME)
    try:
        body = groups.directory.remote().result(timeout_s=config.groups.ready_timeout_s)
    except TimeoutError:
        raise LaunchError(
            f"the ranks were not up within {config.groups.ready_timeout_s:g} s "
            "(groups.ready_timeout_s)"
        ) from None
    return decode_directory(body), groups


def _wait_healthy(url: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    reason = "no answer yet"
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(f"{url}/health", timeout=5.0)
            if answer.status_code == 200:
                return
            reason = answer.text
        except httpx.HTTPError as error:
            reason = str(error)
        time.sleep(0.1)
    raise LaunchError(f"{url}/health was not 200 within {timeout_s:g} s: {reason}")


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # not an address to connect to
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _stop(*, is_ours: bool) -> None:
    """Ends the ranks in order. Our own cluster ends next, with all that is left in it; on an
    existing one the application is deleted, and Serve stays, with what others run there."""
    try:
        groups = serve.get_deployment_handle("Groups", APP_NAME)
        groups.close.remote().result(timeout_s=STOP_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - what it left is ended next, whatever this says
        log.warning("orderly_stop_failed error=%s", error)
    if is_ours:
        return
    try:
        serve.delete(APP_NAME)
    except Exception as error:  # noqa: BLE001 - the error that brought us here must get through
        log.warning("application_not_deleted name=%s error=%s", APP_NAME, error)
