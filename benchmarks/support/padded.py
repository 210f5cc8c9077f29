"""`transformers` on many prompts at once, as fast as it goes: batches of similar length, and no
logits but those that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.support.sides import Implementation


class PaddedModel:
    """One model in this process, on as many threads as torch has."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def use(self, implementation: Implementation) -> None:
        self._model.set_experts_implementation(implementation.experts)
        self._model.set_attn_implementation(implementation.attention)

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]], batch_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """(index, last logits [V] in float32) of every row of ids, in the order of their lengths.

        Rows are padded on the right. Attention is causal, so that no token sees its row's padding,
        and no mask is needed, with which attention would be slower.
        """
        for batch in batches([len(row) for row in rows], batch_tokens):
            longest = max(len(rows[index]) for index in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            for place, index in enumerate(batch):
                ids[place, : len(rows[index])] = torch.tensor(rows[index])
            hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state
            last = [len(rows[index]) - 1 for index in batch]
            head = self._model.lm_head(hidden[torch.arange(len(batch)), last]).float()
            yield from zip(batch, head, strict=True)


@torch.inference_mode()
def routing_gap(folder: Path, token_ids: list[int]) -> float:
    """How far, in router logits computed in float64, the nearest of any token's layers is from
    choosing another expert. Two programs that round differently may choose either at about 1e-6."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    out = model(input_ids=torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    chosen = model.config.num_experts_per_tok
    sorted_TE = [logits.sort(-1, descending=True).values for logits in out.router_logits]
    return min(float((x[:, chosen - 1] - x[:, chosen]).min()) for x in sorted_TE)


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, each of at most `batch_tokens` with its padding (a
    longer row is one by itself)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
