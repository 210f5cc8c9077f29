"""Ranks as plain processes: `python -m tests.support.rank_process` and its handle.

The parent writes one JSON line per call to the child's standard input and reads one JSON line per
answer from its standard output; the child stops when its input closes.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO

import msgspec

import contracts.errors
from contracts.errors import LaunchError, TandemError
from contracts.import_path import module_command
from contracts.placement import PlacementState, PlacementUpdate
from contracts.plan import Plan
from contracts.ranks import RankReady, RankSpec, RankStatus
from contracts.traces import RankTrace

log = logging.getLogger(f"tandem.{__name__}")

# Made here: where two threads make the first one of a type at once, msgspec crashes.
_ARGUMENTS: dict[str, msgspec.json.Decoder[Any]] = {
    "place": msgspec.json.Decoder(PlacementUpdate),
    "prepare": msgspec.json.Decoder(RankSpec),
    "connect": msgspec.json.Decoder(dict[str, str]),
    "join_planner": msgspec.json.Decoder(str),
    "pin_plan": msgspec.json.Decoder(Plan | None),
    "trace": msgspec.json.Decoder(float),
    "drain": msgspec.json.Decoder(float),
    "resize": msgspec.json.Decoder(int),
}
_RESULTS: dict[str, msgspec.json.Decoder[Any]] = {
    "placed": msgspec.json.Decoder(PlacementState),
    "prepare": msgspec.json.Decoder(RankReady),
    "status": msgspec.json.Decoder(RankStatus),
    "trace": msgspec.json.Decoder(RankTrace),
}
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class _Call(msgspec.Struct):
    method: str
    arguments: list[msgspec.Raw] = []


class _Answer(msgspec.Struct, omit_defaults=True):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    arguments: list[Any] = []  # of the error: with them it is made again


_decode_call = msgspec.json.Decoder(_Call).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class RankProcess:
    """A rank in a child process; a `rendezvous.WorkerHandle`. `pid` is the child's.

    inside: a command that runs another one, in a network namespace for example. module: one that
    ends in this one's `main`, where a kind of rank is made in another way.
    """

    def __init__(
        self, name: str, *, inside: Sequence[str] = (), module: str = "tests.support.rank_process"
    ) -> None:
        self.name = name
        self._calls: deque[tuple[str, Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*inside, *module_command(module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent, which ends its ranks in order
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        raw = [msgspec.Raw(msgspec.json.encode(argument)) for argument in arguments]
        line = msgspec.json.encode(_Call(method, raw)) + b"\n"
        assert self._process.stdin is not None
        with self._lock:
            self._calls.append((method, future))
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                self._calls.pop()
                future.set_exception(LaunchError(f"{self.name}: its process is gone"))
        return future

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self, timeout_s: float = 10.0) -> int:
        """End the child, by force at the deadline; return its exit code."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            log.debug("%s: standard input was closed already", self.name)
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                method, future = self._calls.popleft()
                _resolve(future, method, line)
        gone = LaunchError(f"{self.name}: its process ended")
        with self._lock:
            while self._calls:
                self._calls.popleft()[1].set_exception(gone)


def _resolve(future: Future[Any], method: str, line: bytes) -> None:
    answer = _decode_answer(line)
    if answer.error is None:
        future.set_result(_RESULTS.get(method, _ANY).decode(answer.result))
        return
    kind = getattr(contracts.errors, answer.error, None)
    if isinstance(kind, type) and issubclass(kind, TandemError):
        future.set_exception(kind(*answer.arguments))
    else:
        future.set_exception(LaunchError(": ".join([answer.error, *map(str, answer.arguments)])))


def _serve(calls: BinaryIO, answers: BinaryIO) -> None:
    from actors.ranks.shell import WorkerShell  # torch loads in the child only

    shell = WorkerShell()
    try:
        for line in calls:
            answers.write(_execute(shell, line) + b"\n")
            answers.flush()
    finally:
        shell.stop()


def _execute(shell: Any, line: bytes) -> bytes:
    call = _decode_call(line)
    decoder = _ARGUMENTS.get(call.method, _ANY)
    try:
        arguments: list[Any] = [decoder.decode(raw) for raw in call.arguments]
        result = getattr(shell, call.method)(*arguments)
        return msgspec.json.encode(_Answer(msgspec.Raw(msgspec.json.encode(result))))
    except Exception as error:
        log.debug("%s failed", call.method, exc_info=True)
        arguments = list(error.args) if isinstance(error, TandemError) else [str(error)]
        return msgspec.json.encode(_Answer(error=_kind(error).__name__, arguments=arguments))


def _kind(error: Exception) -> type[Exception]:
    """Return its class, or the nearest one known to the parent."""
    known = vars(contracts.errors).values()
    return next((kind for kind in type(error).__mro__[:-2] if kind in known), type(error))


def main() -> None:
    # Answers go to the real standard output; whatever else prints there goes to standard error.
    answers_file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers_file)


if __name__ == "__main__":
    main()
