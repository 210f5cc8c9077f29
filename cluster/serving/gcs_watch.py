"""Watch of the cluster's GCS (Global Control Service), without which nothing starts or ends.

Ray ends a process that has lost the GCS for 60 s, with a C++ message and exit status 1. Calls that
wait for the GCS cannot be interrupted, so the watch ends the process before.
"""

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import psutil
import ray

RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_TIMEOUT_S = 60.0  # its default
RAY_TIMEOUT_SHARE = 0.75
PERIOD_S = 1.0
CONNECT_TIMEOUT_S = 3.0


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
        psutil.wait_procs(children, timeout=CONNECT_TIMEOUT_S)
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
    while not left.wait(PERIOD_S) and time.monotonic() - answered_s <= timeout_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            answered_s = time.monotonic()
        except OSError as error:
            reason = f"its GCS at {address} is away for {timeout_s:g} s: {error}"
    return reason
