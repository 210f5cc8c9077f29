"""Rules by which a row of logits gives the next token, and its log-probabilities."""

from __future__ import annotations

import hashlib
import math
import struct

import torch

from contracts.errors import NotFiniteError
from contracts.messages import TokenLogprob
from contracts.requests import Sampling

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks
MAX_SAFE_LOGIT = 1e30
ROUNDING = 2**-22  # in float32
_DRAWN_BYTES = 6  # fewer bits than float64: a draw times a sum stays below the sum


def not_finite() -> NotFiniteError:
    return NotFiniteError(
        "the model's logits are not finite numbers: no token can be drawn. If this persists, the "
        "checkpoint is damaged, or model.dtype is too narrow for it"
    )


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of generated token `position`, independent per pair."""
    packed = struct.pack("<qq", seed, position)
    digest = hashlib.blake2b(packed, digest_size=_DRAWN_BYTES).digest()
    return int.from_bytes(digest, "little") / (1 << 8 * _DRAWN_BYTES)


def distribution(
    logits_V: torch.Tensor, peak: float, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return probabilities to draw from, not normalized, and their ids (None: all, in order).

    Applies temperature, then min_p, top_k and top_p. The likeliest token, whose logit is `peak`, is
    always included.
    """
    logits_V = logits_V.float()
    if abs(peak) > MAX_SAFE_LOGIT:  # divided by the temperature it would be infinite
        logits_V, peak = logits_V - peak, 0.0
    scaled_V = logits_V / sampling.temperature
    if sampling.min_p > 0:
        min_logit = peak / sampling.temperature + math.log(sampling.min_p)
        min_logit -= ROUNDING * abs(min_logit)  # keeps the likeliest with min_p 1
        scaled_V.masked_fill_(scaled_V < min_logit, -math.inf)
    limit = sampling.top_k if sampling.top_k > 0 else len(scaled_V)
    if sampling.top_p >= 1 and limit >= len(scaled_V):
        return scaled_V.softmax(-1), None
    sorted_K, ids_K = scaled_V.topk(min(limit, len(scaled_V)))
    probs_K = sorted_K.softmax(-1)
    # keep the smallest set whose probability reaches top_p: drop a token if those before it do
    dropped_K = (probs_K.cumsum(-1) - probs_K) >= sampling.top_p
    dropped_K[0] = False  # top_p may be 0 in float32
    probs_K[dropped_K] = 0.0
    return probs_K, ids_K


def draw(logits_V: torch.Tensor, peak: float, sampling: Sampling, drawn: float) -> int:
    """Return the token at which the cumulative probability passes `drawn` of the whole.

    probs_K   | 0.5             | 0.25    | 0 | 0.25    |
    drawn     0 ..............................^ 0.8      1     the last one
    """
    probs_K, ids_K = distribution(logits_V, peak, sampling)
    sums_K = probs_K.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(sums_K, drawn * float(sums_K[-1]), right=True)
    return int(place if ids_K is None else ids_K[place])


def token_logprob(logits_V: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the log-probability of the token and the `num_top` best. Raises SamplingError."""
    logprobs_V = logits_V.float().log_softmax(-1).clamp_(min=MIN_LOGPROB)
    logprob = float(logprobs_V[token])
    if math.isnan(logprob):  # one NaN or +inf logit makes all of them NaN
        raise not_finite()
    if num_top == 0:
        return TokenLogprob(logprob)
    values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(logprob, top)
