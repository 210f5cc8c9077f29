"""Fit of a hardware file's coefficients to measured stage times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from contracts.hardware import (
    AttentionCost,
    ExpertCost,
    Fit,
    LinkCost,
    Point,
    ServingCost,
    SharedCost,
)
from planner.costs.fit import NonNegativeFit, fit_nonnegative
from planner.costs.model_shape import Chunks, ModelShape, batch_work, count_tokens

_LEAST_MS = 1e-3  # of a measured time without logits
_LINEAR = 2  # index among attention's coefficients
_FLOOR_FRACTION = 0.05  # of the fastest sample's time per unit of size


class AttentionSample(NamedTuple):
    """Attention of one layer for a micro-batch in a layer with `window`.

    Rows go to `ranks` expert ranks, each row to `copies` of them.
    """

    label: str
    chunks: Chunks
    window: int | None
    ms: float
    ranks: int = 1
    copies: float = 1.0


class ServingSample(NamedTuple):
    """A batch of prompts outside of its layers, with logits of one row per prompt."""

    label: str
    micro_batches: int
    sequences: int
    tokens: int
    ms: float


class SizedSample(NamedTuple):
    """Shared experts for `size` tokens, or a link for `size` bytes."""

    label: str
    size: int
    ms: float


class ExpertSample(NamedTuple):
    """One token group: `pairs` (token, expert) pairs over `active` experts (a mean)."""

    label: str
    active: float
    pairs: float
    ms: float


def fit_attention(
    shape: ModelShape, samples: Sequence[AttentionSample]
) -> tuple[AttentionCost, Fit]:
    """Fit attention's coefficients. Raises ValueError for samples that cannot be fitted.

    Calls are left out if the FLOP coefficient would vanish, as it can for very small products.
    """
    fit = _attention_fit(shape, samples, with_calls=True)
    if fit.uncertain:
        fit = _attention_fit(shape, samples, with_calls=False)
    call, sequence, linear, attended, context, prompt_call, decode_call, packet, copied = (
        fit.coefficients_F.tolist()
    )
    tokens = [count_tokens(sample.chunks) for sample in samples]
    cost = AttentionCost(
        call_ms=call,
        sequence_ms=sequence,
        linear_ms_per_flop=linear,
        attended_ms_per_flop=attended,
        context_ms_per_byte=context,
        prompt_call_ms=prompt_call,
        decode_call_ms=decode_call,
        packet_ms=packet,
        copied_ms_per_byte=copied,
    )
    return cost, _report("attention", "tokens", fit, tokens, samples)


def _attention_fit(
    shape: ModelShape, samples: Sequence[AttentionSample], *, with_calls: bool
) -> NonNegativeFit:
    works = []
    row_bytes = shape.hidden_size * shape.element_bytes
    for sample in samples:
        work = batch_work(shape, sample.chunks, sample.window)
        if not with_calls:
            work = work._replace(prompt_calls=0.0, decode_calls=0.0)
        rows = count_tokens(sample.chunks)
        copied_bytes = (sample.copies - 1) * rows * row_bytes
        works.append((1.0, *work, sample.ranks - 1.0, copied_bytes))
    return _fitted(works, [sample.ms for sample in samples], slope=_LINEAR)


def fit_serving(
    shape: ModelShape, attention: AttentionCost, samples: Sequence[ServingSample]
) -> tuple[ServingCost, Fit]:
    """Fit the time outside of layers without logits, which cost what linear FLOPs do.

    Raises ValueError for samples that cannot be fitted.
    """
    logits_ms = 2.0 * shape.hidden_size * shape.vocab_size * attention.linear_ms_per_flop
    works = [(1.0, one.micro_batches, one.sequences, one.tokens) for one in samples]
    left_ms = [max(_LEAST_MS, one.ms - logits_ms * one.sequences) for one in samples]
    fit = _fitted(works, left_ms)
    batch, micro_batch, sequence, token = fit.coefficients_F.tolist()
    cost = ServingCost(
        batch_ms=batch, micro_batch_ms=micro_batch, sequence_ms=sequence, token_ms=token
    )
    tokens = [one.tokens for one in samples]
    rest = [one._replace(ms=ms) for one, ms in zip(samples, left_ms, strict=True)]
    return cost, _report("serving", "tokens", fit, tokens, rest)


def fit_shared(shape: ModelShape, samples: Sequence[SizedSample]) -> tuple[SharedCost, Fit]:
    """Fit the shared experts. Raises ValueError for samples that cannot be fitted."""
    flops = [(1.0, 2.0 * shape.shared_elements * sample.size) for sample in samples]
    fit = _fitted(flops, [sample.ms for sample in samples], slope=1)
    call, per_flop = fit.coefficients_F.tolist()
    report = _report("shared", "tokens", fit, [sample.size for sample in samples], samples)
    return SharedCost(call_ms=call, ms_per_flop=per_flop), report


def fit_expert(shape: ModelShape, samples: Sequence[ExpertSample]) -> tuple[ExpertCost, Fit]:
    """Fit an expert call. Raises ValueError for samples that cannot be fitted."""
    works = [(1.0, sample.active, sample.pairs * shape.pair_flops) for sample in samples]
    fit = _fitted(works, [sample.ms for sample in samples], slope=2)
    call, per_expert, per_flop = fit.coefficients_F.tolist()
    pairs = [sample.pairs for sample in samples]
    report = _report("expert", "(token, expert) pairs", fit, pairs, samples)
    return ExpertCost(call_ms=call, expert_ms=per_expert, ms_per_flop=per_flop), report


def fit_link(
    backend: str, direction: Literal["a2e", "e2a"], samples: Sequence[SizedSample]
) -> tuple[LinkCost, Fit]:
    """Fit a link. Raises ValueError for samples that cannot be fitted."""
    sizes = [sample.size for sample in samples]
    works = [(1.0, float(size)) for size in sizes]
    fit = _fitted(works, [sample.ms for sample in samples], slope=1)
    alpha, per_byte = fit.coefficients_F.tolist()
    cost = LinkCost(backend=backend, direction=direction, alpha_ms=alpha, ms_per_byte=per_byte)
    return cost, _report(f"{direction} {backend}", "bytes", fit, sizes, samples)


def _fitted(
    features: Sequence[Sequence[float]], times_ms: Sequence[float], slope: int | None = None
) -> NonNegativeFit:
    """Fit with a bounded slope: the feature whose coefficient must not be 0.

    If noise makes it vanish, it is set to a twentieth of the least time per unit of any sample.
    """
    features_NF = np.array(features, dtype=np.float64)
    times_N = np.array(times_ms, dtype=np.float64)
    fit = fit_nonnegative(features_NF, times_N)
    if slope is None or fit.coefficients_F[slope] > 0 or not (features_NF[:, slope] > 0).any():
        return fit
    sizes_N = features_NF[:, slope]
    used_N = sizes_N > 0
    floor = _FLOOR_FRACTION * float((times_N[used_N] / sizes_N[used_N]).min())
    rest = fit_nonnegative(np.delete(features_NF, slope, axis=1), times_N - floor * sizes_N)
    coefficients_F = np.insert(rest.coefficients_F, slope, floor)
    predicted_N = features_NF @ coefficients_F
    error = float(np.median(np.abs(predicted_N - times_N) / times_N))
    return NonNegativeFit(coefficients_F, predicted_N, rest.r2, error, uncertain=True)


def _report(
    stage: str,
    size_unit: str,
    fit: NonNegativeFit,
    sizes: Sequence[float],
    samples: Sequence[AttentionSample | ServingSample | ExpertSample | SizedSample],
) -> Fit:
    points = [
        Point(sample.label, float(size), sample.ms, float(predicted))
        for sample, size, predicted in zip(samples, sizes, fit.predicted_N, strict=True)
    ]
    return Fit(
        stage=stage,
        size_unit=size_unit,
        r2=fit.r2,
        median_error_fraction=fit.median_error_fraction,
        points=points,
        uncertain=fit.uncertain,
    )
