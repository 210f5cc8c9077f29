"""`tandem serve`: checks, start, wait until every pipeline serves, ordered stop."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from ray.serve.handle import DeploymentHandle

from cluster.fleet.colocation import colocate
from cluster.fleet.model_folder import check_tokenizer, resolve_model_folder
from cluster.fleet.placements import check_placement_file, read_local_shares
from cluster.fleet.replies import Directory, checked
from cluster.http.server import bind, check_public, check_tls
from cluster.serving import application
from cluster.serving.log_folder import log_folder
from cluster.serving.ray_session import ray_session
from cluster.serving.settings import cluster_address, with_absolute_paths, with_variables
from contracts.api_keys import read_keys
from contracts.config import TandemConfig
from contracts.errors import ConfigError, LaunchError
from contracts.logs import set_up_logging
from models.spec.model import ModelSpec
from models.weights.checkpoint import check_checkpoint
from planner.scheduling.user_policy import load_policy

EXIT_UNRECOVERABLE = 3  # a server has failed for good: restart it


class RunningServer(NamedTuple):
    """A running server. groups: handle of the Groups deployment."""

    url: str
    directory: Directory
    groups: DeploymentHandle
    ready_s: float


@contextlib.contextmanager
def serving(
    config: TandemConfig,
    *,
    environment: Mapping[str, str] = os.environ,
    show_rank_logs: bool = False,
    report: Callable[[str], object] = lambda line: None,
) -> Iterator[RunningServer]:
    """Run the whole server inside the context. Raises TandemError, one line each.

    report: receives the path of the logs.
    """
    started_s = time.monotonic()
    _check_http(config)
    config = prepare(config, environment)
    with (
        log_folder(config, environment) as config,
        ray_session(
            config, environment, show_rank_logs=show_rank_logs, lost_status=EXIT_UNRECOVERABLE
        ),
    ):
        set_up_logging("serve", config.log)
        report(f"logs in {config.log.folder}")
        ours = cluster_address(config, environment) is None
        if not ours:
            application.check_absent(config.serve.name)
        deployed = application.deploy(config)
        try:
            limit_s = config.groups.ready_timeout_s
            directory: Directory = checked(
                application.wait_for_reply(deployed, "directory", limit_s, "the ranks were not up")
            )
            scheme = "http" if config.http.tls_certificate is None else "https"
            url = f"{scheme}://{_url_host(config.http.host)}:{config.http.port}"
            _wait_healthy(url, deployed, limit_s)
            yield RunningServer(url, directory, deployed.groups, time.monotonic() - started_s)
        finally:
            application.remove(deployed, is_clusters_end=ours)


def _check_http(config: TandemConfig) -> None:
    """Raise ConfigError for settings that only apply to a server with its own listener."""
    if config.http.front != "direct":
        raise ConfigError(
            f"http.front={config.http.front} is for `serve run`; tandem serve listens itself: "
            "use direct"
        )
    if config.http.port == 0:
        raise ConfigError("http.port=0: clients must know the port; choose one (--port)")


def prepare(config: TandemConfig, environment: Mapping[str, str]) -> TandemConfig:
    """Return the settings of a server, complete and checked, without Ray. Raises TandemError.

    `tandem serve` and `deploy.app:build` both start here.
    """
    config = with_variables(with_absolute_paths(config, Path.cwd()), environment)
    return colocate(config, preflight(config))


def preflight(config: TandemConfig) -> ModelSpec:
    """Check everything that takes only milliseconds, and return the model. Raises TandemError."""
    folder = resolve_model_folder(config.model.path)
    model = check_checkpoint(folder)
    check_tokenizer(folder)
    if config.groups.expert_ranks > model.num_experts:
        raise ConfigError(
            f"groups.expert_ranks={config.groups.expert_ranks}: the model has "
            f"{model.num_experts} experts per layer; use at most that many ranks"
        )
    check_placement_file(config, folder, model)
    read_local_shares(config, folder, model)
    if config.priority.policy is not None:
        load_policy(config.priority.policy)
    check_tls(config.http)
    if config.http.keys_file is not None:
        read_keys(Path(config.http.keys_file))
    if config.http.front == "direct":
        check_public(config.http)
        bind(config.http.host, config.http.port).close()
    return model


def _wait_healthy(url: str, deployed: application.DeployedApp, timeout_s: float) -> None:
    """Wait until clients are answered.

    Raises the error that prevents the ingress's start, or LaunchError at the limit. Until the
    ingress listens, another server may answer at `url`.
    """
    deadline_s = time.monotonic() + timeout_s
    checked(
        application.wait_for_reply(deployed, "ingress", timeout_s, "the ingress did not listen")
    )
    reason = "no answer yet"
    while time.monotonic() < deadline_s:
        try:
            # The certificate is for the name that clients use, and proxies are for other machines.
            answer = httpx.get(f"{url}/health", timeout=5.0, verify=False, trust_env=False)
            if answer.status_code == 200:
                deployed.groups.served.remote().result(timeout_s=application.STOP_TIMEOUT_S)
                return
            reason = answer.text
        except httpx.HTTPError as error:
            reason = str(error)
        application.check_deployed(deployed)
        time.sleep(0.1)
    raise LaunchError(f"{url}/health was not 200 within {timeout_s:g} s: {reason}")


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # not an address to connect to
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
