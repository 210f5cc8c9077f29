"""OpenVINO GenAI beside us, in a child process of an interpreter of its own: its exporter needs an
older `transformers`.

    python -m venv openvino && openvino/bin/pip install optimum-intel openvino-genai
    openvino/bin/python benchmarks/support/openvino_side.py FOLDER float32    # what the child runs
"""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

EXPORT = ["export", "openvino", "--weight-format=fp16", "--task=text-generation-with-past"]


class OpenVino:
    """A pipeline in a child process, with the methods of `sides.Ours`."""

    def __init__(self, python: Path, folder: Path, exported: Path, dtype: str, steps: int) -> None:
        _export(python, folder, exported)
        self._steps = steps
        self._process = subprocess.Popen(
            [python, __file__, exported, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line("ready")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    async def prefill(self, rows: Any) -> list[int]:
        return await self._all(rows.tolist(), 1)

    async def classify(self, rows: Any) -> list[int]:
        """The first row alone: rows computed at once do not share their prefix."""
        return await self.prefill(rows[:1]) + await self.prefill(rows[1:])

    async def decode(self, rows: Any) -> list[int]:
        return await self._all(rows.tolist(), self._steps)

    async def _all(self, rows: list[list[int]], tokens: int) -> list[int]:
        """Return the first token of each row's answer."""
        async with asyncio.timeout(300.0):
            answers = await asyncio.to_thread(self._call, {"rows": rows, "tokens": tokens})
        if any(len(answer) != tokens for answer in answers):
            raise RuntimeError(f"{sorted(map(len, answers))} tokens were generated, not {tokens}")
        return [answer[0] for answer in answers]

    def _call(self, request: dict[str, Any]) -> list[list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found: list[list[int]] = json.loads(self._line("[["))
        return found

    def _line(self, start: str) -> str:
        """Return the next line of the process that starts with `start`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("the process of OpenVINO ended; its messages are above")


def _export(python: Path, folder: Path, exported: Path) -> None:
    """Convert a checkpoint without a tokenizer. Weights in fp16 are the fastest for both types."""
    source = exported.parent / "openvino_source"
    source.mkdir()
    for path in folder.iterdir():
        (source / path.name).symlink_to(path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = {f"t{number}": number for number in range(size)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    tokenizer["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    command = [str(python.parent / "optimum-cli"), *EXPORT, f"--model={source}", str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"optimum-cli could not export:\n{done.stderr[-2000:]}")


def _serve(folder: str, dtype: str) -> None:
    openvino = importlib.import_module("openvino")
    genai = importlib.import_module("openvino_genai")
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    pipeline = genai.LLMPipeline(
        folder, "CPU", scheduler_config=scheduler, INFERENCE_PRECISION_HINT=precision
    )
    settings = genai.GenerationConfig()
    settings.do_sample, settings.ignore_eos, settings.apply_chat_template = False, True, False
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        settings.max_new_tokens = request["tokens"]
        rows = request["rows"]
        ids = openvino.Tensor(_int64(rows))
        mask = openvino.Tensor(_int64([[1] * len(row) for row in rows]))
        answer = pipeline.generate(genai.TokenizedInputs(ids, mask), settings)
        print(json.dumps([list(map(int, row)) for row in answer.tokens]), flush=True)


def _int64(rows: list[list[int]]) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.array(rows, dtype=numpy.int64)


if __name__ == "__main__":
    _serve(*sys.argv[1:3])
