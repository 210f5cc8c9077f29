"""Logits to tokens, on an attention rank."""

from __future__ import annotations

import torch

from actors.sequence import Sequence
from contracts.messages import TokenLogprob
from contracts.requests import Sampling


def sample(
    logits_RV: torch.Tensor, sequences: list[Sequence]
) -> tuple[list[int], list[TokenLogprob | None]]:
    """The next token of each sequence, and its log-probability where asked for.

    Greedy rows (temperature 0) take the arg max. A seeded sequence draws from a generator of its
    own, so that its tokens depend neither on the batch around it nor on the rank.
    """
    greedy = logits_RV.argmax(-1).tolist()
    tokens: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    for row, sequence in enumerate(sequences):
        sampling = sequence.submit.sampling
        assert sampling is not None
        logits_V = logits_RV[row]
        token = greedy[row]
        if sampling.temperature > 0:
            token = _draw(logits_V, sampling, _generator(sequence, logits_V.device))
        tokens.append(token)
        wanted = sampling.logprobs
        logprobs.append(None if wanted is None else token_logprob(logits_V, token, wanted))
    return tokens, logprobs


def _generator(sequence: Sequence, device: torch.device) -> torch.Generator:
    if sequence.generator is None:
        sequence.generator = torch.Generator(device)
        sampling = sequence.submit.sampling
        if sampling is not None and sampling.seed is not None:
            sequence.generator.manual_seed(sampling.seed % 2**63)
        else:
            sequence.generator.seed()
    return sequence.generator


def _draw(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    scaled_V = logits_V / sampling.temperature
    limit = sampling.top_k if sampling.top_k > 0 else len(scaled_V)
    if sampling.top_p >= 1 and limit >= len(scaled_V):
        return int(torch.multinomial(scaled_V.softmax(-1), 1, generator=generator))
    sorted_K, ids_K = scaled_V.topk(min(limit, len(scaled_V)))
    probs_K = sorted_K.softmax(-1)
    # keep the smallest set whose probability reaches top_p: drop a token if those before it do
    probs_K[(probs_K.cumsum(-1) - probs_K) >= sampling.top_p] = 0.0
    return int(ids_K[torch.multinomial(probs_K, 1, generator=generator)])


def token_logprob(logits_V: torch.Tensor, token: int, wanted: int) -> TokenLogprob:
    """The token's log-probability and those of the `wanted` most probable ones."""
    logprobs_V = logits_V.log_softmax(-1)
    if wanted == 0:
        return TokenLogprob(float(logprobs_V[token]))
    values, ids = logprobs_V.topk(min(wanted, len(logprobs_V)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logprobs_V[token]), top)
