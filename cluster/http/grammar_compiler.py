"""Compilation of grammars in a process that a deadline and a memory limit may end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from contracts.import_path import module_command
from models.text.grammar import CompileAnswer, CompileRequest, CompilerSetup
from models.text.tokenizer import Tokenizer

TIMEOUT_S = 2.0
MEMORY_BYTES = 128 << 20
MAX_CACHED = 128  # answers of at most MAX_GRAMMAR_CHARACTERS each
_ANSWER = msgspec.json.Decoder(CompileAnswer)


class GrammarCompiler:
    """Compiles one grammar at a time, in a process that is started again whenever it ends."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = [x for x in eos_token_ids if x < tokenizer.vocab_size]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[CompileRequest, CompileAnswer] = {}

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        self._thread.submit(self._running)

    async def compile(self, request: CompileRequest) -> CompileAnswer:
        """Return the grammar, or what is wrong with its source."""
        answer = self._answers.pop(request, None)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._thread, self._compile, request)
        if answer.is_final:
            self._answers[request] = answer  # the latest last
        if len(self._answers) > MAX_CACHED:
            del self._answers[next(iter(self._answers))]
        return answer

    def close(self) -> None:
        """End the process."""
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
                module_command("models.text.grammar_process"),
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
