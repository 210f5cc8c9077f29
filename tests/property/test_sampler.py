"""Sampling against an independent float64 implementation."""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import kernels.device
from actors.batching.sampler import TokenSampler, distribution
from actors.batching.sequence import Sequence
from contracts.errors import NotFiniteError, SamplingError
from contracts.messages import Submit
from contracts.requests import Sampling
from tests.property.sampling_requests import VOCABULARY, requests

DRAWS = 3000
EOS = 0


def sequence_of(sampling: Sampling, prompt: SequenceOf[int] = (1, 2, 3)) -> Sequence:
    submit = Submit(request_id=1, token_ids=list(prompt), sampling=sampling, eos_token_ids=[EOS])
    return Sequence((0, 1), submit, 4)


# --- a slow reference


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def shaped_by_hand(
    logits: list[float], sampling: Sampling, prompt: list[int], generated: list[int]
) -> list[float]:
    """Reference logits, from all tokens at every step."""
    out = list(logits)
    if sampling.choices is not None:
        done = len(generated)
        open_ = [c for c in sampling.choices if c[:done] == generated]
        allowed = {c[done] for c in open_ if len(c) > done}
        if any(len(c) == done for c in open_):
            allowed.add(EOS)
        out = [x if token in allowed else -math.inf for token, x in enumerate(out)]
    if len(generated) < sampling.min_tokens:
        for token in {*([] if sampling.ignore_eos else [EOS]), *sampling.stop_token_ids}:
            out[token] = -math.inf
    for token, bias in (sampling.logit_bias or {}).items():
        out[token] += bias
    for token in {*prompt, *generated}:
        by = sampling.repetition_penalty
        out[token] = out[token] / by if out[token] > 0 else out[token] * by
    for token in set(generated):
        out[token] -= sampling.frequency_penalty * generated.count(token)
        out[token] -= sampling.presence_penalty
    return out


def probabilities_by_hand(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Reference distribution, most probable first."""
    scaled = [x / sampling.temperature for x in logits]
    probs = softmax(scaled)
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = [token for token in order if probs[token] >= sampling.min_p * probs[order[0]]]
    kept = kept[: sampling.top_k or None]
    whole = math.fsum(probs[token] for token in kept)
    before = 0.0
    nucleus: list[int] = []
    for token in kept:
        if nucleus and before >= sampling.top_p:
            break
        nucleus.append(token)
        before += probs[token] / whole
    whole = math.fsum(probs[token] for token in nucleus)
    return {token: probs[token] / whole for token in nucleus if probs[token] > 0}


def on_an_edge(logits: list[float], sampling: Sampling) -> bool:
    """Return whether float32 may round the other way."""
    probs = sorted(softmax([x / sampling.temperature for x in logits]), reverse=True)
    if any(abs(p - sampling.min_p * probs[0]) < 1e-5 for p in probs if p > 0):
        return True
    kept = [p for p in probs if p >= sampling.min_p * probs[0]][: sampling.top_k or None]
    sums = [math.fsum(kept[:end]) / math.fsum(kept) for end in range(1, len(kept))]
    return any(abs(s - sampling.top_p) < 1e-5 for s in sums)


def chi_square_limit(freedom: int) -> float:
    """Approximate the 99.9 % quantile (Wilson and Hilferty)."""
    z, k = 3.09, 2 / (9 * freedom)
    return freedom * (1 - k + z * math.sqrt(k)) ** 3


def assert_drawn_from(drawn: SequenceOf[int], expected: dict[int, float]) -> None:
    """Check that draws match the distribution in support and frequency."""
    counts = Counter(drawn)
    assert set(counts) == set(expected)
    means = {token: len(drawn) * p for token, p in expected.items()}
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in means.items())
    assert statistic < chi_square_limit(max(1, len(expected) - 1)), (counts, expected)


# --- what is drawn

LOGITS = [2.0, 1.5, 1.2, 1.0, 0.7, 0.4, 0.1, -0.2, -0.6, -1.0]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"top_k": 1},
    {"temperature": 1.7, "top_k": 9},
    {"top_p": 0.75, "temperature": 1.3},
    {"top_p": 0.6, "top_k": 6},
    {"min_p": 0.25},
    {"min_p": 0.1, "top_p": 0.8, "top_k": 7, "temperature": 0.9},
    {"logit_bias": {9: 3.0, 0: -100.0}, "top_p": 0.9},
    {"repetition_penalty": 1.5, "top_k": 8},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_seed_draws_from_exactly_the_requested_distribution(fields: dict[str, Any]) -> None:
    sampling = Sampling(seed=5, **fields)
    expected = probabilities_by_hand(shaped_by_hand(LOGITS, sampling, [1, 2, 3], []), sampling)
    sequence, logits_RV = sequence_of(sampling), torch.tensor([LOGITS])
    drawn = []
    for _ in range(DRAWS):
        drawn.append(TokenSampler(logits_RV).sample(0, sequence)[0])
        sequence.prompt_tokens -= 1  # the next position, and nothing else that penalties count
    assert_drawn_from(drawn, expected)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.75}, {"top_k": 3}], ids=str)
def test_first_tokens_of_many_seeds_follow_the_distribution(fields: dict[str, Any]) -> None:
    sampler = TokenSampler(torch.tensor([LOGITS]))
    settings = [Sampling(seed=seed, **fields) for seed in range(DRAWS)]
    drawn = [sampler.sample(0, sequence_of(sampling))[0] for sampling in settings]
    assert_drawn_from(drawn, probabilities_by_hand(LOGITS, settings[0]))


def test_without_a_seed_two_sequences_draw_differently() -> None:
    sampler = TokenSampler(torch.zeros(1, 1000))
    sequences = [sequence_of(Sampling()) for _ in range(2)]
    first, second = ([drawn_next(sampler, s) for _ in range(20)] for s in sequences)
    assert first != second
    assert len(set(first)) > 10


def drawn_next(sampler: TokenSampler, sequence: Sequence) -> int:
    sequence.token_ids.append(sampler.sample(0, sequence)[0])
    return sequence.token_ids[-1]


def test_seeded_draws_are_independent_of_other_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(50, generator=generator) for _ in range(30)]
    sampling = Sampling(seed=9, top_p=0.9, presence_penalty=0.5, max_tokens=100)
    runs = []
    for around in (0, 3):
        sequence, tokens = sequence_of(sampling), []
        others = [sequence_of(Sampling(seed=i)) for i in range(around)]
        for logits_V in steps:
            rows = [torch.randn(50) for _ in others] + [logits_V]
            sampler = TokenSampler(torch.stack(rows))
            for row, other in enumerate(others):
                sampler.sample(row, other)
            tokens.append(sampler.sample(len(others), sequence)[0])
            sequence.token_ids.append(tokens[-1])
        runs.append(tokens)
    assert runs[0] == runs[1]


# --- every field, against the reference

SIZES = st.floats(-6, 6, width=32)


@given(requests(), st.lists(st.lists(SIZES, min_size=12, max_size=12), min_size=1, max_size=6))
def test_every_field_matches_the_reference_implementation(
    request: tuple[Sampling, list[int]], steps: list[list[float]]
) -> None:
    """Incremental state gives the reference logits and distribution at every step."""
    sampling, prompt = request
    sequence = sequence_of(sampling, prompt)
    for logits in steps:
        expected = shaped_by_hand(logits, sampling, prompt, sequence.token_ids[len(prompt) :])
        logits_V = torch.tensor(logits)
        if sequence.logits_processor is not None:
            shaped_V = sequence.logits_processor.process(logits_V, sequence.token_ids)
            assert shaped_V.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert logits_V.tolist() == logits, "the model's own are for the logprobs"
        token, _ = TokenSampler(logits_V.unsqueeze(0)).sample(0, sequence)
        if sampling.temperature == 0:
            assert expected[token] == pytest.approx(max(expected), abs=1e-4)
        else:
            assume(not on_an_edge(expected, sampling))
            probs_K, ids_K = distribution(torch.tensor(expected), max(expected), sampling)
            ids = range(VOCABULARY) if ids_K is None else ids_K.tolist()
            whole = float(probs_K.sum())
            got = {i: p / whole for i, p in zip(ids, probs_K.tolist(), strict=True) if p > 0}
            by_hand = probabilities_by_hand(expected, sampling)
            assert sorted(got.values()) == pytest.approx(sorted(by_hand.values()), abs=1e-4)
            assert expected[token] > -math.inf
        sequence.token_ids.append(token)
        processor = sequence.logits_processor
        has_chosen = processor is not None and processor.has_chosen(sequence.token_ids)
        if token in sequence.end_token_ids or has_chosen:
            break
    if sampling.choices is not None and sequence.generated:
        generated = [t for t in sequence.token_ids[len(prompt) :] if t != EOS]
        assert any(choice[: len(generated)] == generated for choice in sampling.choices)


@pytest.mark.parametrize("peak", [3e38, -3e38, 1e-40])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 2}], ids=str)
def test_logits_of_any_size_can_be_drawn_from(peak: float, fields: dict[str, Any]) -> None:
    logits_RV = torch.full((1, 5), -3.2e38)
    logits_RV[0, 1] = peak
    for temperature in (1e-5, 1.0, 2.0):
        sampling = Sampling(temperature=temperature, seed=2, **fields)
        assert TokenSampler(logits_RV).sample(0, sequence_of(sampling))[0] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_of_any_dtype_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits_RV = torch.full((1, 8), -60000.0).to(dtype)
    logits_RV[0, 3] = 65504.0
    for temperature in (0.0, 1e-5, 1.0):
        sampling = Sampling(temperature=temperature, logit_bias={3: 100.0}, logprobs=2, top_p=0.5)
        token, logprob = TokenSampler(logits_RV).sample(0, sequence_of(sampling))
        assert token == 3
        assert logprob is not None
        assert (logprob.logprob, logprob.top[1][1]) == (0.0, -9999.0)


def test_fields_that_leave_no_token_are_an_error() -> None:
    sampling = Sampling(min_tokens=2, stop_token_ids=[1, 2])
    with pytest.raises(SamplingError, match="no token is left"):
        TokenSampler(torch.zeros(1, 3)).sample(0, sequence_of(sampling))


# --- on a device


def as_on_a_device(logits_RV: torch.Tensor, sequences: list[Sequence]) -> TokenSampler:
    with patch.object(kernels.device, "ACCELERATORS", frozenset({"cpu"})):
        return TokenSampler(logits_RV, sequences)


@given(
    st.lists(
        st.tuples(requests(), st.lists(SIZES, min_size=12, max_size=12)), min_size=1, max_size=5
    ),
    st.sampled_from([1.0, 0.0, 4e30]),
)
def test_device_samples_a_batch_as_the_host_samples_its_rows(
    rows: list[tuple[tuple[Sampling, list[int]], list[float]]], factor: float
) -> None:
    logits_RV = torch.tensor([logits for _, logits in rows]) * factor
    one, other = ([sequence_of(*request) for request, _ in rows] for _ in range(2))
    batch, single = as_on_a_device(logits_RV, one), TokenSampler(logits_RV)
    for row, sequences in enumerate(zip(one, other, strict=True)):
        assert batch.sample(row, sequences[0]) == single.sample(row, sequences[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_device_reports_bad_rows_alone(value: float) -> None:
    logits_RV = torch.zeros(3, 8)
    logits_RV[0, 3] = value
    blocked = Sampling(min_tokens=2, stop_token_ids=list(range(1, 8)))
    sequences = [sequence_of(each) for each in (Sampling(logprobs=1), blocked, Sampling(seed=3))]
    sampler = as_on_a_device(logits_RV, sequences)
    for row, error in enumerate((NotFiniteError, SamplingError)):
        with pytest.raises(error):
            sampler.sample(row, sequences[row])
    assert sampler.sample(2, sequences[2]) == TokenSampler(logits_RV).sample(2, sequences[2])
