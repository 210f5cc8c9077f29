"""A worker that gives its experts, as a process of its own:
`python -m tests.support.weights_peer FOLDER RANK WORKERS BACKEND TOKEN`. Prints its address; ends
when standard input closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.prefill_workers import TOKEN, make_source, worker_spec


class Peer:
    """Weights of another process. `process`: to stop or kill."""

    def __init__(self, folder: Path, rank: int, workers: int, backend: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.weights_peer"),
                *(str(folder), str(rank), str(workers), backend, TOKEN.hex()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def stop(self) -> None:
        """Return once all of its threads are stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)


@contextmanager
def peer_process(folder: Path, rank: int, workers: int, backend: str) -> Iterator[Peer]:
    peer = Peer(folder, rank, workers, backend)
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.communicate(timeout=10)


if __name__ == "__main__":
    model_folder, rank, workers, backend, token = sys.argv[1:]
    spec = worker_spec(
        Path(model_folder), int(rank), int(workers), backend=backend, token=bytes.fromhex(token)
    )
    source = make_source(spec)
    sys.stdout.write(source.listen("127.0.0.1") + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    source.close()
