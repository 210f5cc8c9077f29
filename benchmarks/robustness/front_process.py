"""An ingress replica in a child process, and its handle: see front.py."""

import signal
import subprocess

import msgspec

from benchmarks.robustness.front import Orders
from cluster.fleet.replies import Directory
from contracts.import_path import module_command


class FrontProcess:
    """Starts at once. `port` once `wait` has returned."""

    def __init__(self, orders: Orders) -> None:
        self.name = orders.name
        self.port = 0
        self._process = subprocess.Popen(
            module_command("benchmarks.robustness.front"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._write(msgspec.json.encode(orders))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """Returns its port once it serves, or 0 if it has ended before."""
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline() or 0)
        return self.port

    def publish(self, directory: Directory) -> None:
        self._write(msgspec.json.encode(directory))

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self, timeout_s: float = 10.0) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            self._process.kill()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)
        self._process.stdout.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:
            return  # it was killed; its successor receives the line
