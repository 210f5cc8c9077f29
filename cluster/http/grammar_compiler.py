"""Compilation of grammars in a process that a deadline and a memory limit may end."""

import asyncio
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from contracts.errors import OverloadError
from contracts.import_path import module_command
from contracts.requests import Caller
from models.text.grammar import CompileAnswer, CompileRequest, CompilerSetup
from models.text.tokenizer import Tokenizer
from planner.scheduling.fair_queue import FairQueue

TIMEOUT_S = 2.0
MEMORY_BYTES = 128 << 20
MAX_WAITING = 32  # different grammars of one tenant
MAX_CACHED = 128  # answers of at most MAX_GRAMMAR_CHARACTERS each
_ANSWER = msgspec.json.Decoder(CompileAnswer)


_Waiting = tuple[bytes, CompileRequest]  # tenant, grammar


class GrammarCompiler:
    """Compiles one grammar at a time, in a process that is started again whenever it ends.

    Tenants take turns, and so do the requests of a tenant.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = [x for x in eos_token_ids if x < tokenizer.vocab_size]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[CompileRequest, CompileAnswer] = {}
        self._turns: FairQueue[_Waiting] = FairQueue()
        self._waiting: dict[_Waiting, asyncio.Future[CompileAnswer]] = {}
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        self._thread.submit(self._running)

    async def compile(self, request: CompileRequest, caller: Caller) -> CompileAnswer:
        """Return the grammar, or what is wrong with its source. Raises OverloadError."""
        if (answer := self._known(request)) is not None:
            return answer
        waiting = caller.tenant, request
        if waiting not in self._waiting:
            if sum(tenant == caller.tenant for tenant, _ in self._waiting) >= MAX_WAITING:
                raise OverloadError(
                    f"{MAX_WAITING} other grammars of this key wait for their compilation: send"
                    " fewer new ones at once",
                    TIMEOUT_S,
                )
            self._waiting[waiting] = asyncio.get_running_loop().create_future()
            self._turns.push(waiting, caller.tenant, caller.request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._compile_waiting())
        return await asyncio.shield(self._waiting[waiting])

    async def _compile_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._turns):
            waiting = self._turns.pop()
            _, request = waiting
            try:
                answer = self._known(request)
                if answer is None:
                    answer = await loop.run_in_executor(self._thread, self._compile, request)
            except Exception as error:  # noqa: BLE001 - raised by the waiting requests
                self._waiting.pop(waiting).set_exception(error)
                continue
            if answer.is_final:
                self._answers[request] = answer  # the latest last
            if len(self._answers) > MAX_CACHED:
                del self._answers[next(iter(self._answers))]
            self._waiting.pop(waiting).set_result(answer)

    def _known(self, request: CompileRequest) -> CompileAnswer | None:
        """Return the answer if it is cached, and make it the latest."""
        answer = self._answers.pop(request, None)
        if answer is not None:
            self._answers[request] = answer
        return answer

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _compile(self, request: CompileRequest) -> CompileAnswer:
        line, code = self._exchange(request)
        if not line and code == -signal.SIGKILL:  # not by its own limits
            line, code = self._exchange(request)
        if line:
            return _ANSWER.decode(line)
        self.start()
        return CompileAnswer(error=_end_reason(code), is_final=False)

    def _exchange(self, request: CompileRequest) -> tuple[bytes, int]:
        """Return the answer, or nothing and the exit code of the process."""
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
            if line := process.stdout.readline():
                return line, 0
        except BrokenPipeError:
            pass
        assert self._process is not None
        return b"", self._process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process. Starts it if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._process = process = subprocess.Popen(
                module_command("models.text.grammar"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert process.stdin is not None
            setup = CompilerSetup(
                self._tokenizer.to_json(), self._eos_token_ids, TIMEOUT_S, MEMORY_BYTES
            )
            process.stdin.write(msgspec.json.encode(setup) + b"\n")
            process.stdin.flush()
        return self._process


def _end_reason(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"compiling it takes longer than {TIMEOUT_S:g} s: simplify it"
    return f"compiling it needs more than {MEMORY_BYTES >> 20} MB: simplify it"
