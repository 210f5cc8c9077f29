"""Two sides of `benchmarks.cases.engines`, with the same methods: `prefill` runs rows as prompts,
`classify` rows with a common prefix, `decode` continues rows greedily."""

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.rank_stream import open_stream
from cluster.routing.rank_client import RankClient
from contracts.messages import Failed, Submit
from contracts.requests import Sampling

Choice = TypeVar("Choice")

CANDIDATES = 64
DECODE_STEPS = 64


class Implementation(NamedTuple):
    """What `transformers` lets one choose."""

    experts: str
    attention: str


# "batched_mm" copies the expert weights for every token.
IMPLEMENTATIONS = [Implementation(e, a) for e in ("eager", "grouped_mm") for a in ("sdpa", "eager")]
CLEARLY_SLOWER = 3.0  # a first pass, which may compile: not timed again


async def fastest(choices: Sequence[Choice], timed: Callable[[Choice], Awaitable[float]]) -> Choice:
    """Return the choice with the fastest pass after a first one, which warms up."""
    seconds = dict.fromkeys(choices, math.inf)
    for number in range(3):
        slowest_s = CLEARLY_SLOWER * min(seconds.values())
        for choice in [each for each, known_s in seconds.items() if known_s <= slowest_s]:
            taken_s = await timed(choice)
            seconds[choice] = taken_s if number < 2 else min(seconds[choice], taken_s)
    return min(seconds, key=seconds.__getitem__)


class Ours:
    """A client of one attention rank."""

    def __init__(self, client: RankClient) -> None:
        self._client = client

    async def prefill(self, rows: torch.Tensor) -> list[int]:
        """The arg max over the candidates at each row's last position."""
        logits = await self._all([
            Submit(request_id=0, token_ids=row, sampling=None, candidates=list(range(CANDIDATES)))
            for row in rows.tolist()
        ])  # fmt: skip
        return [int(torch.tensor(event.candidate_logits).argmax()) for (event,) in logits]

    classify = prefill

    async def decode(self, rows: torch.Tensor) -> list[int]:
        """DECODE_STEPS tokens after each row; returns the first of each."""
        sampling = Sampling(max_tokens=DECODE_STEPS, temperature=0.0, ignore_eos=True)
        answers = await self._all([
            Submit(request_id=0, token_ids=row, sampling=sampling) for row in rows.tolist()
        ])  # fmt: skip
        tokens = [[i for event in events[:-1] for i in event.token_ids] for events in answers]
        _check_steps([len(row) for row in tokens])
        return [row[0] for row in tokens]

    async def _all(self, submits: list[Submit]) -> list[list[Any]]:
        streams = [await open_stream(self._client, submit) for submit in submits]
        answers = [[event async for event in stream] for stream in streams]
        for events in answers:
            if isinstance(events[-1], Failed):
                raise RuntimeError(events[-1].message)
        return answers


class Theirs:
    """`transformers` in this process, on all its cores."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None

    def use(self, implementation: Implementation) -> None:
        self._model.set_experts_implementation(implementation.experts)
        self._model.set_attn_implementation(implementation.attention)

    async def prefill(self, rows: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            logits = self._model(rows, use_cache=False, logits_to_keep=1).logits
        return [int(row.argmax()) for row in logits[:, -1, :CANDIDATES]]

    classify = prefill

    async def decode(self, rows: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            out = self._model.generate(
                rows, max_new_tokens=DECODE_STEPS, do_sample=False, pad_token_id=0
            )
        _check_steps([len(row) - rows.shape[1] for row in out])
        return [int(row[rows.shape[1]]) for row in out]


def _check_steps(steps: list[int]) -> None:
    if set(steps) != {DECODE_STEPS}:
        raise RuntimeError(f"{sorted(set(steps))} tokens were generated, not {DECODE_STEPS}")
