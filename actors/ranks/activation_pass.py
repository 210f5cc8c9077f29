"""Memory that the largest batch needs on a GPU, measured before the KV pool is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.batching.finisher import LOGIT_ROWS
from actors.batching.sampler import draw_rows
from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.requests import Sampling
from kernels.device import GpuMemory
from kernels.gpu_experts import gpu_experts
from kernels.linear import linears
from kernels.steps import add_tiled, run_to_end
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import RoutedTokens
from models.experts.expert_layout import ExpertLayout
from models.experts.expert_loading import clamped_gate
from planner.routing.worker_state import reference_prompts

ExpertSums = Callable[[RoutedTokens], Tensor]


def reference_slices(
    lengths: Sequence[int], vocab_size: int, block_tokens: int
) -> list[SequenceSlice]:
    """Return prompts of these lengths with random tokens, in consecutive blocks from 0 on."""
    generator = torch.Generator().manual_seed(0)
    slices, first = [], 0
    for tokens in lengths:
        ids = torch.randint(vocab_size, (tokens,), generator=generator)
        last = first + -(-tokens // block_tokens)
        slices.append(SequenceSlice(ids.tolist(), 0, range(first, last)))
        first = last
    return slices


def batch_limit(expert_copies: int) -> str:
    """Return the setting that limits a batch. expert_copies: see `activation_bytes`."""
    return f"{'prefill' if expert_copies else 'schedule'}.max_batch_tokens"


def activation_bytes(
    half: AttentionHalf, config: TandemConfig, memory: GpuMemory, expert_copies: int
) -> int:
    """Return the most bytes in use at a time by a batch of `schedule.max_batch_tokens`.

    expert_copies: batches whose experts this rank computes at once: 0 if they are elsewhere, the
    number of workers if each sends its own. Raises ResourceError if there is too little memory.
    """
    model, tokens = half.spec, config.schedule.max_batch_tokens
    lengths = reference_prompts(tokens, model.max_context_tokens)
    slices = reference_slices(lengths, model.vocab_size, config.kv.block_tokens)
    try:
        kv = KvPool(
            model, slices[-1].block_table[-1] + 1, config.kv.block_tokens, half.dtype, half.device,
            one_layer=True,
        )  # fmt: skip
        experts = _one_expert(half, expert_copies) if expert_copies else _elsewhere
        with torch.inference_mode():
            return memory.peak_bytes(lambda: _run(half, slices, kv, experts))
    except torch.OutOfMemoryError:
        raise ResourceError(
            f"{batch_limit(expert_copies)}={tokens}: the GPU's memory does not hold such a batch "
            "beside the weights; lower it"
        ) from None


def _run(
    half: AttentionHalf, slices: Sequence[SequenceSlice], kv: KvPool, experts: ExpertSums
) -> None:
    inputs = AttentionBatch.build(slices, block_tokens=kv.block_tokens, device=kv.device)
    hidden_TD = half.embed(inputs)
    for layer in range(half.spec.num_layers):
        attended = half.attend(layer, hidden_TD, inputs, kv)
        hidden_TD, routed = attended.hidden_TD, attended.routed
        if routed is not None:
            shared_TD = half.shared(layer, routed.router_input)
            for sums_TD in (experts(routed), shared_TD):
                if sums_TD is not None:
                    run_to_end(add_tiled(hidden_TD, sums_TD))
    logits_RV = half.logits(hidden_TD[:LOGIT_ROWS]).float()
    rows, vocabulary = logits_RV.shape
    settings = [Sampling(top_p=0.5)] * rows
    draw_rows(logits_RV, logits_RV.amax(1), settings, [0.0] * rows, vocabulary)


def _elsewhere(routed: RoutedTokens) -> Tensor:
    """Return the memory of the sums that other ranks compute."""
    return torch.zeros_like(routed.x_TD, dtype=torch.float32)


def _one_expert(half: AttentionHalf, copies: int) -> ExpertSums:
    """Return the sums of one expert, which all tokens use: the memory is that of any experts."""
    layout = ExpertLayout(half.spec, half.dtype, half.device, packed=False)
    gate_up, down, *biases = (tensor.zero_() for tensor in layout.empty(1))
    gate_up_bias, down_bias = biases or (None, None)
    products = linears(gate_up, gate_up_bias), linears(down, down_bias)

    def sums(routed: RoutedTokens) -> Tensor:
        x_TD, ids_TK, weights_TK = (
            each.repeat(copies, 1)
            for each in (routed.x_TD, routed.topk_ids_TK, routed.topk_weights_TK)
        )
        ids_TK.zero_()
        sums_TD = gpu_experts(x_TD, ids_TK, weights_TK, *products, clamped_gate(half.spec))
        return sums_TD[: len(routed.x_TD)]

    return sums
