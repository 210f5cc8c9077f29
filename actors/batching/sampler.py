"""Logits to tokens, on an attention rank or a prefill worker."""

from __future__ import annotations

import hashlib
import math
import struct

import torch

from actors.batching.sequence import Sequence
from contracts.errors import NotFiniteError, SamplingError
from contracts.messages import TokenLogprob
from contracts.requests import GREEDY_BELOW, Sampling

MIN_LOGPROB = -9999.0  # what stands for minus infinity, which JSON does not have
MAX_SAFE_LOGIT = 1e30
ROUNDING = 2**-22  # in float32
_DRAWN_BYTES = 6  # fewer bits than float64 has: what is drawn, times a sum, stays below that sum


class TokenSampler:
    """The next tokens of some rows of logits, to be asked for row by row: what is wrong with one
    row raises for that one.

    One arg max serves all rows. Rows of a temperature below GREEDY_BELOW take it; the others draw
    by the sequence's seed and the position, and from nothing else: so tokens depend neither on the
    batch around them nor on the rank, nor on which one has drawn those before.
    """

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self._logits_RV = logits_RV
        best_R = logits_RV.argmax(-1)  # of a row with a NaN: the NaN's place
        self._best: list[int] = best_R.tolist()
        self._peaks: list[float] = logits_RV.gather(-1, best_R.unsqueeze(-1))[:, 0].tolist()

    def sample(self, row: int, sequence: Sequence) -> tuple[int, TokenLogprob | None]:
        """The sequence's next token, and its log-probability where asked for, which is that of the
        model's own distribution. Raises SamplingError, or what torch raises."""
        sampling = sequence.submit.sampling
        assert sampling is not None
        token, peak = self._best[row], self._peaks[row]
        if not math.isfinite(peak):
            raise not_finite()
        logits_V = chosen_by_V = self._logits_RV[row]
        if sequence.logits_processor is not None:
            chosen_by_V = sequence.logits_processor.process(logits_V, sequence.token_ids)
            token = int(chosen_by_V.argmax())
            peak = float(chosen_by_V[token])
            if not math.isfinite(peak):
                raise SamplingError("no token is left that the request's fields allow")
        if sampling.temperature >= GREEDY_BELOW:
            drawn = uniform(sequence.seed, sequence.generated)
            token = _draw(chosen_by_V, peak, sampling, drawn)
        num_top = sampling.logprobs
        return token, None if num_top is None else token_logprob(logits_V, token, num_top)


def not_finite() -> NotFiniteError:
    return NotFiniteError(
        "the model's logits are not finite numbers: no token can be drawn. If this goes on, the "
        "checkpoint is damaged, or model.dtype is too narrow for it"
    )


def uniform(seed: int, position: int) -> float:
    """In [0, 1): what decides the generated token `position` of a sequence. As if drawn anew for
    each of either."""
    packed = struct.pack("<qq", seed, position)
    digest = hashlib.blake2b(packed, digest_size=_DRAWN_BYTES).digest()
    return int.from_bytes(digest, "little") / (1 << 8 * _DRAWN_BYTES)


def distribution(
    logits_V: torch.Tensor, peak: float, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is drawn from, by temperature, then min_p, top_k and top_p: probabilities, not
    normalised, and whose they are (None: of all tokens, in order). The likeliest, whose logit is
    `peak`, is always there."""
    logits_V = logits_V.float()
    if abs(peak) > MAX_SAFE_LOGIT:  # divided by the temperature it would be infinite
        logits_V, peak = logits_V - peak, 0.0
    scaled_V = logits_V / sampling.temperature
    if sampling.min_p > 0:
        min_logit = peak / sampling.temperature + math.log(sampling.min_p)
        min_logit -= ROUNDING * abs(min_logit)  # of the likeliest itself, with min_p 1
        scaled_V.masked_fill_(scaled_V < min_logit, -math.inf)
    limit = sampling.top_k if sampling.top_k > 0 else len(scaled_V)
    if sampling.top_p >= 1 and limit >= len(scaled_V):
        return scaled_V.softmax(-1), None
    sorted_K, ids_K = scaled_V.topk(min(limit, len(scaled_V)))
    probs_K = sorted_K.softmax(-1)
    # keep the smallest set whose probability reaches top_p: drop a token if those before it do
    dropped_K = (probs_K.cumsum(-1) - probs_K) >= sampling.top_p
    dropped_K[0] = False  # none is before it, but 0 >= top_p where that is 0 in float32
    probs_K[dropped_K] = 0.0
    return probs_K, ids_K


def _draw(logits_V: torch.Tensor, peak: float, sampling: Sampling, drawn: float) -> int:
    """The token at which the sum of the probabilities passes that part of the whole.

    probs_K   | 0.5             | 0.25    | 0 | 0.25    |
    drawn     0 ..............................^ 0.8      1     the last one
    """
    probs_K, ids_K = distribution(logits_V, peak, sampling)
    sums_K = probs_K.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(sums_K, drawn * float(sums_K[-1]), right=True)
    return int(place if ids_K is None else ids_K[place])


def token_logprob(logits_V: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """The token's log-probability and those of the `num_top` most probable ones, each at least
    LEAST_LOGPROB. Raises SamplingError where logits are not finite."""
    logprobs_V = logits_V.float().log_softmax(-1).clamp_(min=MIN_LOGPROB)
    logprob = float(logprobs_V[token])
    if math.isnan(logprob):  # as all are, if one logit is NaN or +inf
        raise not_finite()
    if num_top == 0:
        return TokenLogprob(logprob)
    values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(logprob, top)
