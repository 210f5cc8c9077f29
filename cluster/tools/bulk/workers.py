"""Workers of a bulk job: of a running application, or started for the job."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import ray

from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_placement_file, read_local_shares
from cluster.fleet.replies import checked
from cluster.serving.application import check_present, groups_handle
from cluster.serving.ray_session import ray_session
from cluster.serving.serve_app import CLOSE_TIMEOUT_S, ON_HEAD, Groups
from contracts.config import GroupsConfig, TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.logs import event
from models.weights.checkpoint import check_checkpoint

log = logging.getLogger("tandem.bulk")

REPLY_TIMEOUT_S = 30.0


class WorkerSource(NamedTuple):
    """start: starts the workers and returns their owner; None: the running application's."""

    config: TandemConfig
    start: Callable[[], Any | None]


@contextlib.contextmanager
def running_workers(
    address: str, name: str, environment: Mapping[str, str]
) -> Iterator[WorkerSource]:
    """Use the workers of an application on the Ray cluster at `address`. Raises ResourceError."""
    config = TandemConfig(groups=GroupsConfig(address=address))
    with ray_session(config, environment, show_rank_logs=False):
        try:
            check_present(name)
            found: TandemConfig = (
                groups_handle(name).config.remote().result(timeout_s=REPLY_TIMEOUT_S)
            )
        except Exception as error:  # noqa: BLE001 - Serve raises various errors if no application is present
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ResourceError(
                f"no Tandem application {name} answers on the Ray cluster at {address}: {first}; "
                "start it (tandem serve), name another (--name), or give --model to start workers "
                "for this job"
            ) from None
        serve = msgspec.structs.replace(found.serve, name=name)  # `serve run` sets the name
        yield WorkerSource(msgspec.structs.replace(found, serve=serve), lambda: None)


@contextlib.contextmanager
def own_workers(config: TandemConfig, environment: Mapping[str, str]) -> Iterator[WorkerSource]:
    """Start workers for the job, and stop them afterwards.

    They run on the Ray cluster of groups.address or RAY_ADDRESS, or on a local one. Raises
    TandemError, as `start` does.
    """
    folder = resolve_model_folder(config.model.path)
    spec = check_checkpoint(folder)
    check_placement_file(config, folder, spec)
    read_local_shares(config, folder, spec)
    with contextlib.ExitStack() as stack:

        def start() -> Any:
            stack.enter_context(ray_session(config, environment, show_rank_logs=False))
            owner = ray.remote(num_cpus=0, resources=ON_HEAD)(Groups)
            groups = owner.remote(config, application="")
            stack.callback(_close, groups)
            timeout_s = config.groups.ready_timeout_s
            try:
                checked(ray.get(groups.directory.remote(), timeout=timeout_s))
            except ray.exceptions.GetTimeoutError:
                raise LaunchError(
                    f"the workers were not up within {timeout_s:g} s (groups.ready_timeout_s)"
                ) from None
            except ray.exceptions.RayError as error:
                first = str(error).strip().partition("\n")[0]
                raise LaunchError(f"the launcher of the workers is lost: {first}") from None
            return groups

        yield WorkerSource(config, start)


def _close(groups: Any) -> None:
    try:
        ray.get(groups.close.remote(), timeout=CLOSE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - it is killed next in any case
        event(log, "graceful_stop_failed", logging.WARNING, error=error)
    ray.kill(groups)
