"""Prefill and decode tokens/s of 1 attention + 1 expert rank beside `transformers` on the same two
cores, checkpoint, rows and dtype, interleaved in one run.

    python -m benchmarks.beside_transformers --dtype bfloat16
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from actors.channels.handshake import Identity
from actors.local_group import LocalGroup
from benchmarks.harness import record
from benchmarks.random_checkpoint import MEDIUM, write_random_checkpoint
from cluster.rank_client import RankClient
from contracts.loading import load_config
from contracts.messages import Failed, Submit
from contracts.requests import Sampling

# "batched_mm" copies the expert weights for every token: minutes for one prefill of this size.
EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm")
DECODE_ROWS, DECODE_PROMPT, DECODE_STEPS = 16, 32, 64


class Ours:
    """A client of one attention rank."""

    def __init__(self, client: RankClient) -> None:
        self._client = client

    async def prefill(self, rows: torch.Tensor) -> list[int]:
        """Runs the rows as prompts; the arg max over 64 candidates at each last position."""
        logits = await self._all([
            Submit(request_id=0, token_ids=row, sampling=None, candidates=list(range(64)))
            for row in rows.tolist()
        ])  # fmt: skip
        return [int(torch.tensor(event.candidate_logits).argmax()) for (event,) in logits]

    async def decode(self, rows: torch.Tensor) -> list[list[int]]:
        """DECODE_STEPS greedy tokens after each row."""
        sampling = Sampling(max_tokens=DECODE_STEPS, temperature=0.0, ignore_eos=True)
        answers = await self._all([
            Submit(request_id=0, token_ids=row, sampling=sampling) for row in rows.tolist()
        ])  # fmt: skip
        return [[i for event in events[:-1] for i in event.token_ids] for events in answers]

    async def _all(self, submits: list[Submit]) -> list[list[Any]]:
        streams = [await self._client.submit(submit) for submit in submits]
        answers = [[event async for event in stream] for stream in streams]
        for events in answers:
            if isinstance(events[-1], Failed):
                raise RuntimeError(events[-1].message)
        return answers


class Theirs:
    """`transformers` in this process, both cores, with the experts implementation given."""

    def __init__(self, folder: Path, dtype: torch.dtype, implementation: str) -> None:
        self.implementation = implementation
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation=implementation
        ).eval()
        self._model.generation_config.eos_token_id = None

    async def prefill(self, rows: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            logits = self._model(rows, use_cache=False, logits_to_keep=1).logits[:, -1, :64]
        return [int(row.argmax()) for row in logits]

    async def decode(self, rows: torch.Tensor) -> list[list[int]]:
        with torch.inference_mode():
            out = self._model.generate(
                rows, max_new_tokens=DECODE_STEPS, do_sample=False, pad_token_id=0
            )
        return [row[DECODE_PROMPT:].tolist() for row in out]


def main() -> None:
    options = _options()
    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = write_random_checkpoint(Path(folder) / "medium", MEDIUM)
        best = _best_implementation(path, dtype, options)
        config = load_config(
            None,
            [
                f"model.dtype={options.dtype}",
                "kv.prefix_cache=false",
                f"kv.pool_tokens={4 * options.sequences * options.tokens}",
                f"schedule.r1={options.r1}",
            ],
        )
        with LocalGroup(str(path), config) as group:
            if os.cpu_count() == 2:
                for core, process in enumerate(group.processes.values()):
                    os.sched_setaffinity(process.pid, {core})
            samples = asyncio.run(_measure(group, Theirs(path, dtype, best), options))
    _report(samples, best, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="per sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--r1", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    return parser.parse_args()


def _rows(options: argparse.Namespace, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefill = torch.randint(1, 8192, (options.sequences, options.tokens), generator=generator)
    return prefill, torch.randint(1, 8192, (DECODE_ROWS, DECODE_PROMPT), generator=generator)


def _best_implementation(folder: Path, dtype: torch.dtype, options: argparse.Namespace) -> str:
    """The experts implementation with which `transformers` prefills fastest here."""
    prefill, _ = _rows(options, seed=0)
    seconds = {}
    for implementation in EXPERTS_IMPLEMENTATIONS:
        model = Theirs(folder, dtype, implementation)
        try:
            asyncio.run(model.prefill(prefill))
            started_s = time.monotonic()
            asyncio.run(model.prefill(prefill))
            seconds[implementation] = time.monotonic() - started_s
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{implementation}: not on this machine ({str(error).splitlines()[0]})")
    print("transformers prefill:", {name: f"{s:.2f} s" for name, s in seconds.items()})
    return min(seconds, key=lambda name: seconds[name])


async def _measure(
    group: LocalGroup, theirs: Theirs, options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Tokens/s by phase and side, one sample per round."""
    ((name, address),) = group.client_addresses.items()
    client = RankClient(name, address, Identity(name="bench", token=group.token, epoch=None))
    client.start()
    await client.wait_until(lambda ready: ready.problem is None)
    ours = Ours(client)
    samples: dict[str, dict[str, list[float]]] = {
        phase: {"tandem": [], "transformers": []} for phase in ("prefill", "decode")
    }
    agree = []
    for number in range(options.rounds + 1):  # the first round warms up
        prefill, decode = _rows(options, seed=number)
        for phase, rows, tokens in (
            ("prefill", prefill, prefill.numel()),
            ("decode", decode, DECODE_ROWS * DECODE_STEPS),
        ):
            answers = []
            for side, runner in (("tandem", ours), ("transformers", theirs)):
                seconds, answer = await _timed(getattr(runner, phase), rows)
                answers.append(answer)
                if number:
                    samples[phase][side].append(tokens / seconds)
            if phase == "prefill":
                agree += [a == b for a, b in zip(*answers, strict=True)]
    await client.close()
    if sum(agree) < 0.9 * len(agree):
        raise RuntimeError(f"only {sum(agree)} of {len(agree)} answers agree: nothing is reported")
    return samples


async def _timed(
    run: Callable[[torch.Tensor], Awaitable[Any]], rows: torch.Tensor
) -> tuple[float, Any]:
    started_s = time.monotonic()
    answer = await run(rows)
    return time.monotonic() - started_s, answer


def _report(
    samples: dict[str, dict[str, list[float]]], best: str, options: argparse.Namespace
) -> None:
    table = Table(title=f"{options.dtype}; transformers with experts {best}")
    for heading in ("phase", "tandem tokens/s", "transformers tokens/s", "ratio, pair by pair"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    summary: dict[str, Any] = {"transformers_experts": best}
    for phase, sides in samples.items():
        pairs = zip(sides["tandem"], sides["transformers"], strict=True)
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        medians = {side: statistics.median(values) for side, values in sides.items()}
        summary[phase] = {**medians, "ratio_median": statistics.median(ratios), "ratios": ratios}
        table.add_row(
            phase,
            f"{medians['tandem']:.0f}",
            f"{medians['transformers']:.0f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        )
    Console(width=100).print(table)
    record(f"beside_transformers_{options.dtype}", options, samples, summary)


if __name__ == "__main__":
    main()
