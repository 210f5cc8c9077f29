"""Processes forked from one that has imported torch and loaded the compiled kernels.

`python -m tests.support.fork_server FD` serves until the other end of that socket closes.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("attention", "expert", "planner", "prefill")  # which a shell imports when it makes one
MAX_REQUEST_BYTES = 1 << 16


class ForkServer:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def start(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                cwd=ROOT,
            )

    def call(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            return int(self._socket.recv(MAX_REQUEST_BYTES))

    def import_too(self, module: str) -> None:
        """Import a module into processes forked from now on."""
        self.call({"import": module})

    def close(self) -> None:
        self._socket.close()
        self._process.wait(120.0)  # it may still be importing, on a busy machine


class ForkedProcess:
    """The part of `subprocess.Popen` for `python -m MODULE ARGUMENT...` that tests use."""

    def __init__(self, module: str, *arguments: str) -> None:
        child_in, parent_in = os.pipe()
        parent_out, child_out = os.pipe()
        self.stdin = os.fdopen(parent_in, "wb")
        self.stdout = os.fdopen(parent_out, "rb")
        try:
            self.pid = fork_server().call(
                {"module": module, "arguments": arguments}, [child_in, child_out]
            )
        finally:
            os.close(child_in)
            os.close(child_out)
        self.returncode: int | None = None
        self._ended = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._ended)
        self._reaping = threading.Lock()  # two threads may wait

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        with self._reaping:
            if self.returncode is None:
                self.returncode = fork_server().call({"reap": self.pid})
            return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


def start_forked(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Make `module` fork where it calls `subprocess.Popen(module_command(…))`."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=_popen, **names))
    monkeypatch.setattr(module, "module_command", lambda name: [sys.executable, "-m", name])


def _popen(command: Sequence[str], **_: Any) -> ForkedProcess:
    """Fork for [python, "-m", module, ...] with both pipes."""
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    return ForkedProcess(module, *arguments)


def _next_child(server: socket.socket) -> dict[str, Any] | None:
    """Return in a child what it runs; return None in the server when its socket closes."""
    while True:
        body, fds, _, _ = socket.recv_fds(server, MAX_REQUEST_BYTES, 2)
        if not body:
            return None
        request: dict[str, Any] = json.loads(body)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            server.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if "import" in request:
            importlib.import_module(request["import"])
            server.send(b"0")
            continue
        pid = os.fork()
        if pid == 0:
            for fd, standard in zip(fds, (0, 1), strict=True):
                os.dup2(fd, standard)
                os.close(fd)
            return request
        for fd in fds:
            os.close(fd)
        server.send(str(pid).encode())


def main() -> None:
    for module in ("actors.ranks.shell", *(f"actors.ranks.{kind}_rank" for kind in KINDS)):
        importlib.import_module(module)
    importlib.import_module("kernels.linear").compile_kernels()  # starts no thread
    gc.freeze()  # no collection of a child looks through what is imported
    with socket.socket(fileno=int(sys.argv[1])) as server:
        child = _next_child(server)
    if child is not None:
        os.setsid()
        sys.argv = [child["module"], *child["arguments"]]
        runpy.run_module(child["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
