"""Who computes the rows of the prefill benchmarks: token ids in, logits of candidates out."""

import asyncio
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from actors.channels.handshake import Identity
from actors.planning.planner_inputs import shape_of
from benchmarks.support.padded import PaddedModel
from benchmarks.support.prefill_rows import Encode, Rows
from benchmarks.support.random_checkpoint import MEDIUM, write_random_checkpoint
from benchmarks.support.sides import Implementation
from cluster.fleet.model_folder import resolve_model_folder
from cluster.routing.pipeline_backend import PipelineBackend
from cluster.routing.prefill_placer import PrefillPlacer
from cluster.routing.rank_client import RankClient
from cluster.routing.rank_set import RoutingConfig
from contracts.config import BUNDLED, TandemConfig
from contracts.messages import Scored, Submit
from contracts.requests import Priority
from models.spec.model import read_spec
from planner.routing.open_requests import work_of
from planner.routing.worker_state import SaturationConfig, reference_prompts
from tests.support.local_group import LocalGroup

TOKENIZER = "tokenizers/olmo_gpt-neox-dolma-v1_5.tokenizer.json"
# A real tokenizer's vocabulary, and no other change.
MEDIUM_WORDS: dict[str, Any] = {**MEDIUM, "vocab_size": 50304, "torch_dtype": "float32"}
MODELS: dict[str, dict[str, Any]] = {"medium": MEDIUM_WORDS, BUNDLED: {"folder": BUNDLED}}


def model_folder(model: str, data: Path, scratch: Path) -> Path:
    """Of one of MODELS, with a tokenizer; made in `scratch` if need be."""
    if model != "medium":
        return resolve_model_folder(model)
    folder = write_random_checkpoint(scratch, MEDIUM_WORDS)
    shutil.copy(data / TOKENIZER, folder / "tokenizer.json")
    return folder


def encoder(folder: Path) -> Encode:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]


class Answer(NamedTuple):
    """logits [rows, candidates]. cached_tokens: of each row."""

    logits: Tensor
    cached_tokens: list[int]


class RoutedPrefill:
    """Prefill workers behind the router, in front of which a bulk job would stand."""

    def __init__(self, group: LocalGroup, folder: Path, config: TandemConfig, dtype: torch.dtype):
        spec, prefill = read_spec(folder), config.prefill
        saturation = SaturationConfig(
            fallback_prompts=reference_prompts(prefill.max_batch_tokens, spec.max_context_tokens),
            margin_fraction=prefill.saturation_margin,
            pinned=prefill.saturation,
        )
        clients = _clients(group)
        settings = RoutingConfig(block_tokens=config.kv.block_tokens, max_waiting=1 << 20)
        work = work_of(shape_of(spec, dtype.itemsize))
        self._router = PipelineBackend(PrefillPlacer(clients, settings, saturation, work))

    async def start(self) -> None:
        self._router.start()
        await self._router.wait_ready()

    async def close(self) -> None:
        await self._router.close()

    async def run(self, rows: Rows) -> Answer:
        scores = [self._score(ids, rows.candidates) for ids in rows.token_ids]
        answers = await asyncio.gather(*scores)
        logits = torch.tensor([answer.candidate_logits for answer in answers])
        return Answer(logits, [answer.usage.cached_tokens for answer in answers])

    async def _score(self, token_ids: list[int], candidates: list[int]) -> Scored:
        return await self._router.score(_job(token_ids, candidates), wait_for_slot=True)


def _clients(group: LocalGroup) -> list[RankClient]:
    me = Identity(name="bench", token=group.token, epoch=None)
    return [RankClient(name, at, me) for name, at in group.client_addresses.items()]


def _job(token_ids: list[int], candidates: list[int]) -> Submit:
    return Submit(
        request_id=0,
        token_ids=token_ids,
        sampling=None,
        priority=Priority.BE,
        candidates=candidates,
    )


class Choice(NamedTuple):
    """What `transformers` lets one choose, and how large its batches are."""

    implementation: Implementation
    batch_tokens: int

    @property
    def label(self) -> str:
        experts, attention = self.implementation
        return f"{experts} experts, {attention} attention, batches of {self.batch_tokens} tokens"


class TheirPrefill:
    """`transformers` in padded batches, in this process."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = PaddedModel(folder, dtype)
        self.choice: Choice | None = None

    async def run(self, rows: Rows) -> Answer:
        if self.choice is None:
            raise RuntimeError("choose an implementation first")
        self._model.use(self.choice.implementation)
        out = torch.empty(len(rows.token_ids), len(rows.candidates))
        for index, logits in self._model.logits(rows.token_ids, self.choice.batch_tokens):
            out[index] = logits[rows.candidates]
        return Answer(out, [0] * len(out))
