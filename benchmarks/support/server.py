"""`tandem serve` as a process of its own, the way a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from cluster.http.server import free_port
from contracts.errors import LaunchError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.02


class ServerProcess:
    """A context manager: starts at once, and is gone afterwards. `url` has no /v1.
    checkout: source tree to run (default: this one). log: file for its standard error."""

    def __init__(
        self,
        *arguments: str,
        checkout: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        log: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments: Sequence[str] = arguments
        self._checkout = checkout
        self._environment = environment
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def __enter__(self) -> ServerProcess:
        self.started_s = time.monotonic()
        command = [sys.executable, "-m", "cluster", "serve", "--port", str(self.port)]
        folder = None if self._checkout is None else str(self._checkout.resolve())
        with contextlib.ExitStack() as stack:
            log = None if self._log is None else stack.enter_context(self._log.open("wb"))
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=folder,
                env={**self._environment, **({"PYTHONPATH": folder} if folder else {})},
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_healthy(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Seconds from the process's start to the first 200 of /health. Raises LaunchError."""
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while (waited_s := time.monotonic() - self.started_s) < timeout_s:
                if self._process.poll() is not None:
                    raise LaunchError(f"tandem serve ended with {self._process.returncode}")
                if _is_healthy(client):
                    return time.monotonic() - self.started_s
                time.sleep(POLL_S)
        raise LaunchError(f"{self.url}/health was not 200 within {waited_s:.0f} s")


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
