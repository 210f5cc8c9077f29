"""Connection to Ray: an existing cluster, or a local one, and the watch of its GCS.

Without the GCS (Global Control Service) nothing starts or ends. Ray ends a process that has lost it
for 60 s, with a C++ message and exit status 1. Calls that wait for it cannot be interrupted, so the
watch ends the process before.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import ray
from ray.job_config import JobConfig

from cluster.serving.log_folder import keep_ray_logs
from cluster.serving.settings import cluster_address
from contracts.config import TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.import_path import workers_path, working_directory
from contracts.logs import event
from contracts.machine import usable_cores

OBJECT_STORE_BYTES = 256 << 20  # only small objects
PROBE_TIMEOUT_S = 3.0
START_ATTEMPTS = 3
KILL_DEADLINE_S = 10.0
EXEC_DEADLINE_S = 1.0
RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_TIMEOUT_S = 60.0  # its default
RAY_TIMEOUT_SHARE = 0.75
GCS_PERIOD_S = 1.0
_HTTP2_SETTINGS = b"\x04"  # type of the first frame of both sides
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0" * 5
LOCAL_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's default is 15: on a busy machine ranks would starve
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # no dashboard shows them, and they take a core's tenth
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}

log = logging.getLogger(f"tandem.{__name__}")


@contextlib.contextmanager
def ray_session(
    config: TandemConfig,
    environment: Mapping[str, str],
    *,
    show_rank_logs: bool,
    lost_status: int = 2,
) -> Iterator[None]:
    """Connect to Ray. A local cluster ends with the context.

    show_rank_logs: show the ranks' standard error (loading progress, warnings).
    lost_status: exit status of this process if the cluster is lost (`gcs_watched`).
    Raises ResourceError if the cluster at groups.address (or RAY_ADDRESS) does not answer, and
    LaunchError if a local one does not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = cluster_address(config, environment)
    if address is not None:
        path = workers_path(Path.cwd())
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            with working_directory(Path(folder)):
                _connect(address, environment, path, show_rank_logs)
            try:
                with gcs_watched(environment, folder, lost_status):
                    yield
            finally:
                ray.shutdown()
        return
    check_cores(config)
    with _hangup_blocked():
        folder = _start_local(show_rank_logs)
    try:
        with gcs_watched(environment, folder, lost_status, ends_cluster=True):
            yield
    finally:
        ray.shutdown()
        if config.log.folder is not None:
            keep_ray_logs(Path(folder) / "session_latest", Path(config.log.folder))
        shutil.rmtree(folder, ignore_errors=True)  # Ray's sockets and logs


@contextlib.contextmanager
def _hangup_blocked() -> Iterator[None]:
    """Block SIGHUP while Ray starts; afterwards it ends this process as SIGTERM does.

    A closed terminal signals all of its processes. Those of Ray inherit the block, so that this
    process can end them in order. An ignored SIGHUP (nohup) stays ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _probe(address: str, environment: Mapping[str, str]) -> None:
    """Raise OSError unless host:port speaks HTTP/2, as Ray's gRPC does.

    Ray itself would try for minutes.
    """
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


def _connect(
    address: str, environment: Mapping[str, str], path: list[str], show_rank_logs: bool
) -> None:
    try:
        _probe(address, environment)
        ray.init(
            address=address,
            log_to_driver=show_rank_logs,
            logging_level="ERROR",
            job_config=JobConfig(_py_driver_sys_path=path),
        )
        _restore_sigterm()
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"no Ray cluster answers at {address} (groups.address or RAY_ADDRESS): {first} "
            "[with token authentication, set RAY_AUTH_MODE=token]"
        ) from None


def check_cores(config: TandemConfig) -> None:
    """Raise ResourceError if a local cluster cannot hold the ranks."""
    groups = config.groups
    needed = groups.cpus_per_rank * groups.ranks
    cores = usable_cores()
    if needed > cores:
        raise ResourceError(
            f"groups: {groups.attention_ranks} attention, {groups.expert_ranks} expert and "
            f"{groups.prefill_ranks} prefill ranks of {groups.cpus_per_rank:g} CPUs need "
            f"{needed:g}, this machine has {cores:g}; "
            "use fewer ranks or lower groups.cpus_per_rank"
        )


def _start_local(show_rank_logs: bool) -> str:
    """Start a local cluster and return its folder. Raises LaunchError.

    Retried if Ray gives up: its raylet ends if agents take more than a fixed 15 s to start, and
    `ray.init` times out after 30 s.
    """
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, START_ATTEMPTS + 1):
        folder = _session_folder()
        if not os.access(os.path.expanduser("~"), os.W_OK):  # a container's user; Ray writes there
            os.environ["HOME"] = folder
        try:
            with working_directory(Path(folder)):
                _init_local(folder, show_rank_logs)
        except BaseException as error:
            ray.shutdown()
            _kill_started(folder)
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):  # an interrupt
                raise
            reason = str(error).strip().partition("\n")[0]
            event(log, "local_ray_failed", attempt=attempt, reason=reason)
        else:
            return folder
    raise LaunchError(
        f"the local Ray cluster did not start, {START_ATTEMPTS} times: {reason} "
        "[on an overloaded machine: start again]"
    )


def _session_folder() -> str:
    """Make a folder whose name is short enough for Ray's sockets. Raises LaunchError."""
    parent = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
    try:
        return tempfile.mkdtemp(prefix="tandem-", dir=parent)
    except OSError as error:
        raise LaunchError(
            f"no temporary folder for Ray: {error}; set TMPDIR to a writable folder with a short "
            "name"
        ) from None


def _restore_sigterm() -> None:
    """Install Python's handler anew: Ray adds one that prints a C++ stack first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _init_local(folder: str, show_rank_logs: bool) -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=show_rank_logs,
        logging_level="ERROR",
        job_config=JobConfig(_py_driver_sys_path=workers_path()),
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    _restore_sigterm()


def _kill_started(folder: str) -> None:
    """Kill the processes of a failed start; Ray would do so only when this process ends."""
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(folder in word for word in _command_line(process)):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=KILL_DEADLINE_S)


def _command_line(process: psutil.Process) -> list[str]:
    """Return the words of a command line, empty within execve."""
    deadline = time.monotonic() + EXEC_DEADLINE_S
    while not (words := process.cmdline()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return words


def gcs_timeout_s(environment: Mapping[str, str]) -> float:
    """Return for how long the GCS may be away: less than Ray's own limit."""
    try:
        return RAY_TIMEOUT_SHARE * float(environment.get(RAY_TIMEOUT, RAY_TIMEOUT_S))
    except ValueError:
        return RAY_TIMEOUT_SHARE * RAY_TIMEOUT_S


@contextlib.contextmanager
def gcs_watched(
    environment: Mapping[str, str], folder: str, lost_status: int, *, ends_cluster: bool = False
) -> Iterator[None]:
    """Within the context, end this process with `lost_status` if the GCS is lost.

    It prints one line and removes `folder`. ends_cluster: also kill the processes of the cluster,
    which are this one's children.
    """
    address, timeout_s = ray.get_runtime_context().gcs_address, gcs_timeout_s(environment)
    left = threading.Event()

    def run() -> None:
        reason = wait_lost(address, timeout_s, left)
        if left.is_set():
            return
        sys.stderr.write(f"tandem: the Ray cluster is lost: {reason}\n")
        sys.stderr.flush()
        children = psutil.Process().children(recursive=True) if ends_cluster else []
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=PROBE_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(lost_status)

    threading.Thread(target=run, name="gcs-watch", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def wait_lost(address: str, timeout_s: float, left: threading.Event) -> str:
    """Wait until `left` is set or the GCS has refused connections for `timeout_s`; return why."""
    host, _, port = address.rpartition(":")
    answered_s, reason = time.monotonic(), ""
    while not left.wait(GCS_PERIOD_S) and time.monotonic() - answered_s <= timeout_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
            answered_s = time.monotonic()
        except OSError as error:
            reason = f"its GCS at {address} is away for {timeout_s:g} s: {error}"
    return reason
