"""All that needs a GPU, as one command: tests, then benchmarks, each a process with a time limit.

    make gpu                                        (up to 35 minutes on one GPU of 80 GiB)
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --only tests kernels

Needs a CUDA build of torch from 2.10 on, and what a part names beside it; no network, no Ray, no
checkpoint, and it installs nothing. Results: benchmarks/results/gpu_*.json, and a table at the end.

Exit status: 0 all parts ran and passed; 1 one failed, took too long, or lacks a package; 2 wrong
arguments; 3 there is no GPU here, which one line says.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
LIMIT_S: Final = 480.0  # of a part
NO_GPU: Final = 3
COMMON: Final = ("msgspec", "numpy", "psutil", "safetensors", "llguidance")  # beside torch
_END_S: Final = 10.0
_PYTEST: Final = (
    "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib",
)  # fmt: skip


class Part(NamedTuple):
    """Check of a part of the GPU code.

    module: run with -m. needs: packages beside `COMMON`. one, two: what one and two GPUs show.
    """

    name: str
    what: str
    module: Sequence[str]
    needs: Sequence[str] = ()
    one: str = ""
    two: str = ""

    def command(self, results: Path) -> list[str]:
        arguments = [word.replace("RESULTS", str(results)) for word in self.module]
        return [sys.executable, "-m", *arguments]


PARTS: Final = (
    Part(
        "tests", "tests/gpu, and triton's kernels against the references",
        (*_PYTEST, "tests/gpu", "tests/unit/kernels/test_triton.py",
         "tests/unit/kernels/test_flashinfer.py", "tests/unit/actors/moe/test_device_dispatch.py"),
        ("pytest", "hypothesis", "xdist", "transformers", "tokenizers", "triton",
         "prometheus_client"),
        "all pass: packets and sums of a device have the CPU's bits, and no call waits for it",
        "the NCCL tests are not skipped",
    ),
    Part(
        "kernels", "few tokens with experts in slots, beside torch's products",
        ("benchmarks", "slot_kernels", "--output", "RESULTS/slot_kernels.json"), ("triton",),
        "70 % of the memory's bytes/s (2.3 TB/s on an H100) from 8 pairs on",
    ),
    Part(
        "offloaded", "decode with 10 to 100 % of the experts kept, contexts of 1k and 64k",
        ("benchmarks", "offloaded_on_gpu", "--output", "RESULTS/offloaded_on_gpu.json"),
        ("tokenizers",), "80 % of the tokens/s of Eq. 1; at 100 % kept, of resident experts",
    ),
    Part(
        "streamed", "prefill with experts streamed from the host's memory beside resident ones",
        ("benchmarks", "streamed_on_gpu", "--limit-s", "330",
         "--output", "RESULTS/streamed_on_gpu.json"), (),
        "MFU 40 % with resident experts; streamed: 95 % of it above the threshold, and 95 % of the "
        "copies' time overlapped",
    ),
    Part(
        "channels", "round trips and bandwidth of CUDA IPC on one GPU, of NCCL between two",
        ("benchmarks", "channels", "--output", "RESULTS/channels_gpu.json"), ("cupy",),
        "IPC: 80 % of a device copy's bytes/s", "NCCL: 80 % of the link's (360 GB/s one way on an "
        "H100's NVLink); 95 % of A2E and E2A overlapped with compute",
    ),
)  # fmt: skip


class Outcome(NamedTuple):
    part: str
    status: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.status == "passed"


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """The exit status."""
    given = _options(arguments, parts)
    chosen = [part for part in parts if not given.only or part.name in given.only]
    if given.list:
        for part in chosen:
            needs = f" (needs {', '.join(part.needs)})" if part.needs else ""
            print(f"{part.name:10} {part.what}{needs}")
            print(f"{'':10} one GPU: {part.one}\n{'':10} two: {part.two or 'the same'}")
        return 0
    missing = why_no_gpu()
    if missing:
        print(f"no GPU here, nothing was run: {missing}")
        return NO_GPU
    outcomes = [run(part, given.results, given.limit_s) for part in chosen]
    report(outcomes, given)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def why_no_gpu() -> str:
    """Empty: there is one, and torch sees it."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} of {sys.executable} sees none"


def run(part: Part, results: Path, limit_s: float) -> Outcome:
    """Prints what the part prints. A part that takes too long is killed, with all it started."""
    missing = [name for name in (*COMMON, *part.needs) if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(part.name, f"not run: no {', '.join(missing)}", 0.0)
    print(f"\n== {part.name}: {part.what}", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        part.command(results.resolve()),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(limit_s)
        status = "passed" if code == 0 else f"failed: exit status {code}"
    except subprocess.TimeoutExpired:
        status = f"failed: not done after {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left running too
        process.wait(_END_S)
    return Outcome(part.name, status, time.monotonic() - start_s)


def report(outcomes: Sequence[Outcome], given: argparse.Namespace) -> None:
    """A table, and the same as a result."""
    from benchmarks.harness import Result, write_result

    rows = {each.part: {"status": each.status, "seconds": each.seconds} for each in outcomes}
    result = Result(
        name="gpu_parts",
        kind="measured",
        settings={"only": given.only or [], "limit_s": given.limit_s},
        samples={},
        summary=rows,
    )
    print(f"\n{result.environment['gpu']}, torch {result.environment['versions']['torch']}")
    for each in outcomes:
        print(f"{each.part:10} {each.seconds:6.0f} s  {each.status}")
    print(f"written: {write_result(result, given.results / 'gpu_parts.json')}")


def _options(arguments: list[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="say which parts there are")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
