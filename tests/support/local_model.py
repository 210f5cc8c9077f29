"""The whole decoder in one process, no channels: our own reference for every other mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.experts import local_index
from kernels.steps import run_to_end
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice, StateRun
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_half import ExpertHalf, RoutedTokens, expert_sum_steps
from models.experts.expert_layout import ExpertLayout
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import Progress


class LocalModel:
    """One attention half and one expert half per entry of the split."""

    def __init__(
        self, attention: AttentionHalf, experts: Sequence[ExpertHalf], block_tokens: int = 16
    ) -> None:
        self.spec: ModelSpec = attention.spec
        self.attention = attention
        self.experts = tuple(experts)
        self.block_tokens = block_tokens
        self._local_of_E = [
            {
                layer: local_index(list(ids), self.spec.num_experts).to(attention.device)
                for layer, ids in half.expert_ids.items()
            }
            for half in experts
        ]

    @staticmethod
    def load(
        folder: Path,
        *,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        device: torch.device | str = "cpu",
        expert_split: Sequence[Sequence[int]] | None = None,
        progress: Progress | None = None,
    ) -> LocalModel:
        """expert_split: the expert ids of each expert half (default: one half with all)."""
        spec = check_checkpoint(folder)
        checkpoint = Checkpoint(folder)
        kind = resolve_dtype(spec, dtype)
        split = [list(range(spec.num_experts))] if expert_split is None else expert_split
        attention = AttentionHalf.load(
            checkpoint, spec, dtype=kind, device=device, progress=progress
        )
        experts = [
            ExpertHalf.load(checkpoint, spec, ids, dtype=kind, device=device, progress=progress)
            for ids in split
        ]
        return LocalModel(attention, experts)

    def new_pool(self, num_blocks: int, *, num_states: int = 1) -> KvPool:
        sizes = num_blocks, self.block_tokens
        half = self.attention
        return KvPool(self.spec, *sizes, half.dtype, half.device, num_states=num_states)

    def run(self, slices: Sequence[SequenceSlice], kv: KvPool) -> Tensor:
        """hidden_TD after the last layer, for all new tokens of the slices in order."""
        batch = AttentionBatch.build(
            slices, block_tokens=kv.block_tokens, device=self.attention.device
        )
        hidden_TD = self.attention.embed(batch)
        for layer in range(self.spec.num_layers):
            attended = self.attention.attend(layer, hidden_TD, batch, kv)
            hidden_TD = attended.hidden_TD
            if attended.routed is not None:
                self._add_experts(layer, hidden_TD, attended.routed)
        return run_to_end(self.attention.residual(hidden_TD, batch))

    def forward(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [S, V] float32 of all positions, one tensor per sequence."""
        needed = [-(-len(ids) // self.block_tokens) for ids in sequences]
        kv = self.new_pool(sum(needed))
        slices, first = [], 0
        for ids, blocks in zip(sequences, needed, strict=True):
            slices.append(SequenceSlice(ids, 0, range(first, first + blocks)))
            first += blocks
        logits = self.attention.logits(self.run(slices, kv))
        return list(torch.split(logits, [len(ids) for ids in sequences]))

    def last_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return logits of the last position of each sequence."""
        return torch.stack([logits_TV[-1] for logits_TV in self.forward(sequences)])

    def greedy(self, token_ids: Sequence[int], steps: int) -> list[int]:
        """The `steps` most likely next tokens, with a KV cache; eos does not end it."""
        num_blocks = -(-(len(token_ids) + steps) // self.block_tokens)
        kv = self.new_pool(num_blocks)
        table, new, start = range(num_blocks), list(token_ids), 0
        generated: list[int] = []
        while len(generated) < steps:
            state = StateRun(0, 0 if start else None)
            hidden_TD = self.run([SequenceSlice(new, start, table, state=state)], kv)
            start += len(new)
            new = [int(self.attention.logits(hidden_TD[-1:]).argmax())]
            generated += new
        return generated

    def _add_experts(self, layer: int, hidden_TD: Tensor, routed: RoutedTokens) -> None:
        """Adds the expert halves' sums, in the order of the split, to hidden_TD in place."""
        whole_TD: Tensor | None = None
        for half, local_of_E in zip(self.experts, self._local_of_E, strict=True):
            out_TD = run_to_end(
                expert_sum_steps(routed, half.layer_experts(layer), local_of_E[layer])
            )
            whole_TD = out_TD if whole_TD is None else whole_TD.add_(out_TD)
        if whole_TD is not None:
            hidden_TD.add_(whole_TD)
        shared_TD = self.attention.shared(layer, routed.router_input)
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)


def resident_store(experts: ExpertHalf) -> CopyingStore:
    """Return a store of experts on the CPU that are all resident."""
    layout = ExpertLayout(experts.spec, torch.float32, torch.device("cpu"), packed=False)
    return CopyingStore(None, experts.layers(), layout, deadline_s=20.0)
