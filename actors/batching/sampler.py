"""Rules by which rows of logits give next tokens, and log-probabilities.

A request's fields first change the model's logits (`LogitsProcessor`). The order is vLLM's: choices
or grammar, min_tokens, logit_bias, then repetition_penalty, frequency_penalty and presence_penalty.
Temperature, min_p, top_k and top_p follow in `distribution`.

`draw` and `token_logprob` are of one row. `sample_on_device` gives the same tokens for a batch on a
device, where the host reads once whatever the number of sequences, except where the device's
arithmetic has other bits.

Shapes: R rows, V vocabulary, n rows with equal top_k or number of log-probabilities.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.batching.grammar_matcher import GrammarMatcher
from contracts.errors import NotFiniteError, SamplingError
from contracts.messages import Submit, TokenLogprob
from contracts.requests import GREEDY_BELOW, Sampling
from contracts.token_trie import ChoiceMatcher
from kernels.device import runs_on_device, upload
from kernels.flashinfer_kernels import top_probs

if TYPE_CHECKING:  # sequences have processors
    from actors.batching.sequence import Sequence

_INITIAL_CAPACITY = 64


class LogitsProcessor:
    """State of one sequence, kept across requeues because generated tokens stay.

    grammar: set before the first token if the request has one.
    """

    def __init__(self, submit: Submit, sampling: Sampling) -> None:
        self.grammar: GrammarMatcher | None = None
        self._sampling = sampling
        self._submit = submit
        self._matcher: ChoiceMatcher | None = None
        self._seen: TokenPenalties | None = None
        self._num_seen = submit.prompt_tokens  # tokens of the sequence in this state
        self._masked: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None

    def process(self, logits_V: Tensor, token_ids: SequenceOf[int]) -> Tensor:
        """Return the changed logits for the token after `token_ids`, as a new tensor.

        `token_ids` begin with those of every earlier call. All logits are minus infinity if no
        token is allowed.
        """
        sampling = self._sampling
        if sampling.has_penalties and self._seen is None:
            prompt = self._prompt if sampling.repetition_penalty != 1 else ()
            self._seen = TokenPenalties(prompt, logits_V.device)
        if sampling.choices is not None and self._matcher is None:  # built on first use
            self._matcher = ChoiceMatcher(sampling.choices)
        self._update(token_ids)
        shaped_V = logits_V.to(torch.float32, copy=True)
        if self._matcher is not None:
            allowed = self._matcher.allowed_tokens(_valid_ids(self._submit.eos_token_ids, shaped_V))
            shaped_V = _mask_all_but(shaped_V, allowed)
        if self.grammar is not None:
            self.grammar.forbid(shaped_V)
        if len(token_ids) - self._submit.prompt_tokens < sampling.min_tokens:
            self._mask_endings(shaped_V)
        if sampling.logit_bias:
            self._add_biases(shaped_V, sampling.logit_bias)
        if self._seen is not None:
            self._seen.apply(shaped_V, sampling)
        return shaped_V

    def has_chosen(self, token_ids: SequenceOf[int]) -> bool:
        """Return whether a choice or the grammar is complete and nothing can follow."""
        if self.grammar is not None:
            self.grammar.advance(token_ids[self._submit.prompt_tokens :])
            return self.grammar.is_complete
        if self._matcher is None:
            return False
        self._update(token_ids)
        return self._matcher.is_complete

    @property
    def _prompt(self) -> SequenceOf[int]:
        return self._submit.token_ids[: self._submit.prompt_tokens]

    def _update(self, token_ids: SequenceOf[int]) -> None:
        new = token_ids[self._num_seen :]
        if self._matcher is not None:
            for token in new:
                self._matcher.step(token)
        if self._seen is not None:
            self._seen.count_generated(new)
        self._num_seen = len(token_ids)

    def _mask_endings(self, shaped_V: Tensor) -> None:
        if self._masked is None:
            ids = _valid_ids(self._submit.end_token_ids, shaped_V)
            self._masked = torch.tensor(ids, dtype=torch.int64, device=shaped_V.device)
        shaped_V[self._masked] = -math.inf

    def _add_biases(self, shaped_V: Tensor, biases: dict[int, float]) -> None:
        if self._biases is None:
            ids = torch.tensor(list(biases), dtype=torch.int64, device=shaped_V.device)
            values = torch.tensor(list(biases.values()), device=shaped_V.device)
            self._biases = ids, values.float()
        ids_B, values_B = self._biases
        shaped_V[ids_B] += values_B


class TokenPenalties:
    """Distinct tokens with generated counts: a step is one operation over them."""

    def __init__(self, prompt: Iterable[int], device: torch.device) -> None:
        ids = list(dict.fromkeys(prompt))
        capacity = max(_INITIAL_CAPACITY, 2 * len(ids))
        self._place_of = {token: place for place, token in enumerate(ids)}
        self._ids_N = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._ids_N[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self._counts_N = torch.zeros(capacity, device=device)

    def count_generated(self, tokens: SequenceOf[int]) -> None:
        """Count new tokens: one, or all that another rank generated."""
        for token, count in Counter(tokens).items():
            place = self._place_of.setdefault(token, len(self._place_of))
            if place == len(self._ids_N):
                self._ids_N = torch.cat([self._ids_N, torch.zeros_like(self._ids_N)])
                self._counts_N = torch.cat([self._counts_N, torch.zeros_like(self._counts_N)])
            self._ids_N[place] = token
            self._counts_N[place] += count

    def apply(self, logits_V: Tensor, sampling: Sampling) -> None:
        seen = len(self._place_of)
        ids_N, counts_N = self._ids_N[:seen], self._counts_N[:seen]
        values_N, by = logits_V[ids_N], sampling.repetition_penalty
        if by != 1:
            values_N = torch.where(values_N > 0, values_N / by, values_N * by)
        values_N -= sampling.frequency_penalty * counts_N
        values_N -= sampling.presence_penalty * (counts_N > 0)
        logits_V[ids_N] = values_N


def logits_processor(submit: Submit) -> LogitsProcessor | None:
    """Return the processor of a request; None if it samples from the model's own logits."""
    sampling = submit.sampling
    return LogitsProcessor(submit, sampling) if sampling and sampling.modifies_logits else None


def _valid_ids(token_ids: Iterable[int], logits_V: Tensor) -> list[int]:
    """Return the ids that have a logit: a model's eos tokens may lack one."""
    return [token for token in token_ids if 0 <= token < len(logits_V)]


def _mask_all_but(logits_V: Tensor, allowed: list[int]) -> Tensor:
    ids_A = torch.tensor(allowed, dtype=torch.int64, device=logits_V.device)
    kept_V = torch.full_like(logits_V, -math.inf)
    kept_V[ids_A] = logits_V[ids_A]
    return kept_V


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


def distribution(logits_V: Tensor, peak: float, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return probabilities to draw from, not normalized, and their ids in order (None: all).

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
    ids_K, order_K = ids_K[~dropped_K].sort()
    return probs_K[~dropped_K][order_K], ids_K


def draw(logits_V: Tensor, peak: float, sampling: Sampling, drawn: float) -> int:
    """Return the token at which the cumulative probability passes `drawn` of the whole.

    probs_K   | 0.5             | 0.25    | 0 | 0.25    |
    drawn     0 ..............................^ 0.8      1     the last one
    """
    probs_K, ids_K = distribution(logits_V, peak, sampling)
    sums_K = probs_K.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(sums_K, drawn * float(sums_K[-1]), right=True)
    return int(place if ids_K is None else ids_K[place])


def token_logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
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


class TokenSampler:
    """Next tokens of some rows of logits, sampled row by row so that errors stay with a row.

    One arg max serves all rows; a device samples all of them at once. Rows with a temperature below
    GREEDY_BELOW use it. The others draw from the sequence's seed and the position only, so tokens
    depend neither on the batch nor on the rank, nor on which rank drew the earlier ones.
    """

    def __init__(
        self,
        logits_RV: Tensor,
        sequences: SequenceOf[Sequence] | None = None,
        best: list[int] | None = None,
    ) -> None:
        """sequences: of the rows, for a device; None: each row is sampled alone.

        best: place of each row's largest, or of a NaN, if it is known.
        """
        self._logits_RV = logits_RV
        self._samples: list[RowSample] | None = None
        if sequences is not None and runs_on_device(logits_RV.device):
            self._samples = sample_on_device(logits_RV, sequences)
            return
        self._best: list[int] = best or logits_RV.argmax(-1).tolist()  # or a NaN's
        self._numbers_RV = logits_RV.float().numpy()

    def sample(self, row: int, sequence: Sequence) -> tuple[int, TokenLogprob | None]:
        """Return the next token and, if requested, its log-probability under the model.

        Raises SamplingError, or what torch raises.
        """
        if self._samples is not None:
            return _checked(self._samples[row])
        sampling = sequence.submit.sampling
        assert sampling is not None
        token = self._best[row]
        peak = float(self._numbers_RV[row, token])
        if not math.isfinite(peak):
            raise not_finite()
        logits_V = chosen_by_V = self._logits_RV[row]
        if sequence.logits_processor is not None:
            chosen_by_V = sequence.logits_processor.process(logits_V, sequence.token_ids)
            largest, place = chosen_by_V.max(-1)
            token, peak = int(place), float(largest)
            if not math.isfinite(peak):
                raise _none_left()
        if sampling.temperature >= GREEDY_BELOW:
            drawn = uniform(sequence.seed, sequence.generated)
            token = draw(chosen_by_V, peak, sampling, drawn)
        num_top = sampling.logprobs
        return token, None if num_top is None else token_logprob(logits_V, token, num_top)


def _none_left() -> SamplingError:
    return SamplingError("no token is left that the request's fields allow")


def _checked(sample: RowSample) -> tuple[int, TokenLogprob | None]:
    """Return a sample of a device. Raises as `TokenSampler.sample`."""
    token, peak, allowed, logprobs, best = sample
    if not math.isfinite(peak) or any(map(math.isnan, logprobs[:1])):
        raise not_finite()
    if not math.isfinite(allowed):
        raise _none_left()
    if not logprobs:
        return token, None
    top = list(zip(best, logprobs[1:], strict=True))
    return token, TokenLogprob(logprobs[0], top) if top else TokenLogprob(logprobs[0])


_K = TypeVar("_K", bound=Hashable)


class RowSample(NamedTuple):
    """peak: largest logit of the model. allowed: largest of those changed by the request.

    logprobs: of the token, then of the best ones; best: their ids. Empty if not requested.
    """

    token: int
    peak: float
    allowed: float
    logprobs: list[float]
    best: list[int]


def sample_on_device(logits_RV: Tensor, sequences: SequenceOf[Sequence]) -> list[RowSample]:
    """Return a sample of each row. Rows whose peak is not finite hold anything else.

    Raises what the logits processor of a sequence raises.
    """
    settings = [_sampling(sequence) for sequence in sequences]
    peaks_R = logits_RV.max(-1).values
    shaped_RV = logits_RV.float()
    changed = [row for row, each in enumerate(sequences) if _is_changed(each)]
    if changed:
        shaped_RV = shaped_RV.clone()
    for row in changed:
        processor = sequences[row].logits_processor
        assert processor is not None
        shaped_RV[row] = processor.process(logits_RV[row], sequences[row].token_ids)
    allowed_R, tokens_R = shaped_RV.max(-1)
    for limit, rows in _grouped([_limit(each, logits_RV.shape[1]) for each in settings]).items():
        if limit is not None:
            drawn = [uniform(sequences[row].seed, sequences[row].generated) for row in rows]
            picked = [settings[row] for row in rows]
            (rows_n,) = upload([np.array(rows)], logits_RV.device)
            tokens_n = draw_rows(shaped_RV[rows_n], allowed_R[rows_n], picked, drawn, limit)
            tokens_R = tokens_R.index_copy(0, rows_n, tokens_n)
    found = [peaks_R.double(), allowed_R.double(), tokens_R.double()]
    groups = _grouped([each.logprobs for each in settings])
    groups.pop(None, None)
    for num_top, rows in groups.items():
        (rows_n,) = upload([np.array(rows)], logits_RV.device)
        logprobs_nV = logits_RV[rows_n].float().log_softmax(-1).clamp_(min=MIN_LOGPROB)
        chosen_n = logprobs_nV.gather(1, tokens_R[rows_n].unsqueeze(1))
        values_nK, ids_nK = logprobs_nV.topk(min(num_top or 0, logits_RV.shape[1]))
        found += [each.double().flatten() for each in (chosen_n, values_nK, ids_nK)]
    return _rows(torch.cat(found).tolist(), len(sequences), groups, logits_RV.shape[1])


def _rows(
    numbers: list[float], count: int, groups: dict[int | None, list[int]], vocabulary: int
) -> list[RowSample]:
    """Cut what was read into rows."""
    peaks, allowed, tokens = (numbers[n * count : (n + 1) * count] for n in range(3))
    logprobs: list[list[float]] = [[] for _ in range(count)]
    best: list[list[int]] = [[] for _ in range(count)]
    first = 3 * count
    for num_top, rows in groups.items():
        width = min(num_top or 0, vocabulary)
        values = first + len(rows)
        ids = values + len(rows) * width
        for place, row in enumerate(rows):
            those = slice(values + place * width, values + (place + 1) * width)
            logprobs[row] = [numbers[first + place], *numbers[those]]
            best[row] = list(map(int, numbers[ids + place * width : ids + (place + 1) * width]))
        first = ids + len(rows) * width
    lines = zip(tokens, peaks, allowed, logprobs, best, strict=True)
    return [RowSample(int(token), peak, most, each, ids) for token, peak, most, each, ids in lines]


def _is_changed(sequence: Sequence) -> bool:
    """Return whether the request changes logits, and was not complete on a lost rank."""
    is_complete = sequence.grammar is not None and sequence.grammar.is_complete
    return sequence.logits_processor is not None and not is_complete


def _sampling(sequence: Sequence) -> Sampling:
    assert sequence.submit.sampling is not None
    return sequence.submit.sampling


def _grouped(keys: SequenceOf[_K]) -> dict[_K, list[int]]:
    """Return the rows of each key."""
    rows_of: defaultdict[_K, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows_of[key].append(row)
    return dict(rows_of)


def _limit(sampling: Sampling, vocabulary: int) -> int | None:
    """Return how many tokens are sorted to draw one; 0: none; None: greedy."""
    if sampling.temperature < GREEDY_BELOW:
        return None
    limit = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
    return 0 if sampling.top_p >= 1 and limit >= vocabulary else limit


def draw_rows(
    logits_nV: Tensor,
    peaks_n: Tensor,
    settings: SequenceOf[Sampling],
    drawn: SequenceOf[float],
    limit: int,
) -> Tensor:
    """Return the token of each row [n], as `draw` of one row."""
    fields = [
        [each.temperature for each in settings],
        [each.top_p for each in settings],
        [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in settings],
        drawn,
    ]
    (fields_4n,) = upload([np.array(fields)], logits_nV.device)
    temperatures_n1, top_p_n1, min_p_n1, drawn_n1 = fields_4n.unsqueeze(2)
    peaks_n1 = peaks_n.double().unsqueeze(1)
    shifts_n1 = torch.where(peaks_n1.abs() > MAX_SAFE_LOGIT, peaks_n1, 0.0)
    scaled_nV = (logits_nV - shifts_n1.float()) / temperatures_n1.float()
    least_n1 = (peaks_n1 - shifts_n1) / temperatures_n1 + min_p_n1
    least_n1 -= ROUNDING * least_n1.abs()
    scaled_nV.masked_fill_(scaled_nV < least_n1.float(), -math.inf)
    probs_nV = top_probs(scaled_nV, limit, top_p_n1[:, 0]) if limit else scaled_nV.softmax(-1)
    sums_nV = probs_nV.cumsum(-1, dtype=torch.float64)
    places_n1 = torch.searchsorted(sums_nV, drawn_n1 * sums_nV[:, -1:], right=True)
    return places_n1.clamp_(max=sums_nV.shape[1] - 1).squeeze(1)  # of a row that is not finite
