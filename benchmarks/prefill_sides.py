"""The two sides of `benchmarks.prefill_beside_transformers`: rows in, logits of candidates out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from actors.channels.handshake import Identity
from actors.local_group import LocalGroup
from actors.model_shape import shape_of
from benchmarks.padded import Asked, PaddedModel
from benchmarks.prefill_rows import Rows
from benchmarks.sides import Implementation
from cluster.prefill_router import PrefillRouter, PrefillRouterConfig
from cluster.rank_client import RankClient
from contracts.config import TandemConfig
from contracts.messages import Scored, Submit
from contracts.requests import Priority
from models.spec import read_spec
from planner.request_work import work_of
from planner.saturation import SaturationConfig, reference_prompts


class Answer(NamedTuple):
    """logits [rows, candidates]. cached_tokens: of each row."""

    logits: Tensor
    cached_tokens: list[int]


class OurPrefill:
    """Prefill workers behind the router, in front of which a bulk job would stand."""

    def __init__(self, group: LocalGroup, folder: Path, config: TandemConfig, dtype: torch.dtype):
        spec, prefill = read_spec(folder), config.prefill
        saturation = SaturationConfig(
            fallback_prompts=reference_prompts(prefill.max_batch_tokens, spec.max_context_tokens),
            margin_fraction=prefill.margin,
            pinned=prefill.saturation,
        )
        me = Identity(name="bench", token=group.token, epoch=None)
        clients = [RankClient(name, at, me) for name, at in group.client_addresses.items()]
        settings = PrefillRouterConfig(
            saturation=saturation, block_tokens=config.kv.block_tokens, max_waiting=1 << 20
        )
        self._router = PrefillRouter(clients, settings, work_of(shape_of(spec, dtype)))

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
        submit = Submit(
            request_id=0,
            token_ids=token_ids,
            sampling=None,
            priority=Priority.BE,
            candidates=candidates,
        )
        return await self._router.score(submit, patient=True)


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
        asked = [Asked.last(ids) for ids in rows.token_ids]
        out = torch.empty(len(asked), len(rows.candidates))
        for index, logits in self._model.logits(asked, self.choice.batch_tokens):
            out[index] = logits[0, rows.candidates]
        return Answer(out, [0] * len(asked))
