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
_LINEAR = "linear_ms_per_flop"
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


_ATTENTION = (
    "call_ms", "sequence_ms", "linear_ms_per_flop", "attended_ms_per_flop", "context_ms_per_byte",
    "prompt_call_ms", "decode_call_ms", "packet_ms", "copied_ms_per_byte",
)  # fmt: skip


def fit_attention(
    shape: ModelShape, samples: Sequence[AttentionSample]
) -> tuple[AttentionCost, Fit]:
    """Fit attention's coefficients. Raises ValueError for samples that cannot be fitted.

    Calls are left out if the FLOP coefficient would vanish, as it can for very small products.
    """
    tokens = [count_tokens(sample.chunks) for sample in samples]
    for with_calls in (True, False):
        works = [_attention_work(shape, sample, with_calls=with_calls) for sample in samples]
        found, fit = _fit("attention", "tokens", works, tokens, samples, _ATTENTION.index(_LINEAR))
        if not fit.uncertain:
            break
    return AttentionCost(**dict(zip(_ATTENTION, found, strict=True))), fit


def _attention_work(
    shape: ModelShape, sample: AttentionSample, *, with_calls: bool
) -> tuple[float, ...]:
    work = batch_work(shape, sample.chunks, sample.window)
    if not with_calls:
        work = work._replace(prompt_calls=0.0, decode_calls=0.0)
    row_bytes = shape.hidden_size * shape.element_bytes
    copied_bytes = (sample.copies - 1) * count_tokens(sample.chunks) * row_bytes
    return (1.0, *work, sample.ranks - 1.0, copied_bytes)


def fit_serving(
    shape: ModelShape, attention: AttentionCost, samples: Sequence[ServingSample]
) -> tuple[ServingCost, Fit]:
    """Fit the time outside of layers without logits, which cost what linear FLOPs do.

    Raises ValueError for samples that cannot be fitted.
    """
    logits_ms = 2.0 * shape.hidden_size * shape.vocab_size * attention.linear_ms_per_flop
    works = [(1.0, one.micro_batches, one.sequences, one.tokens) for one in samples]
    rest = [one._replace(ms=max(_LEAST_MS, one.ms - logits_ms * one.sequences)) for one in samples]
    found, fit = _fit("serving", "tokens", works, [one.tokens for one in samples], rest)
    batch, micro_batch, sequence, token = found
    cost = ServingCost(
        batch_ms=batch, micro_batch_ms=micro_batch, sequence_ms=sequence, token_ms=token
    )
    return cost, fit


def fit_shared(shape: ModelShape, samples: Sequence[SizedSample]) -> tuple[SharedCost, Fit]:
    """Fit the shared experts. Raises ValueError for samples that cannot be fitted."""
    flops = [(1.0, 2.0 * shape.shared_elements * sample.size) for sample in samples]
    sizes = [sample.size for sample in samples]
    (call, per_flop), fit = _fit("shared", "tokens", flops, sizes, samples, slope=1)
    return SharedCost(call_ms=call, ms_per_flop=per_flop), fit


def fit_expert(shape: ModelShape, samples: Sequence[ExpertSample]) -> tuple[ExpertCost, Fit]:
    """Fit an expert call. Raises ValueError for samples that cannot be fitted."""
    works = [(1.0, sample.active, sample.pairs * shape.pair_flops) for sample in samples]
    pairs = [sample.pairs for sample in samples]
    found, fit = _fit("expert", "(token, expert) pairs", works, pairs, samples, slope=2)
    call, per_expert, per_flop = found
    return ExpertCost(call_ms=call, expert_ms=per_expert, ms_per_flop=per_flop), fit


def fit_link(
    backend: str, direction: Literal["a2e", "e2a"], samples: Sequence[SizedSample]
) -> tuple[LinkCost, Fit]:
    """Fit a link. Raises ValueError for samples that cannot be fitted."""
    sizes = [sample.size for sample in samples]
    works = [(1.0, float(size)) for size in sizes]
    (alpha, per_byte), fit = _fit(f"{direction} {backend}", "bytes", works, sizes, samples, slope=1)
    cost = LinkCost(backend=backend, direction=direction, alpha_ms=alpha, ms_per_byte=per_byte)
    return cost, fit


def _fit(
    stage: str,
    size_unit: str,
    works: Sequence[Sequence[float]],
    sizes: Sequence[float],
    samples: Sequence[AttentionSample | ServingSample | ExpertSample | SizedSample],
    slope: int | None = None,
) -> tuple[list[float], Fit]:
    """Return the coefficients of `works`, and the fit's report over `sizes`. slope: `_fitted`."""
    fit = _fitted(works, [sample.ms for sample in samples], slope)
    points = [
        Point(sample.label, float(size), sample.ms, float(predicted))
        for sample, size, predicted in zip(samples, sizes, fit.predicted_N, strict=True)
    ]
    report = Fit(
        stage=stage,
        size_unit=size_unit,
        r2=fit.r2,
        median_error_fraction=fit.median_error_fraction,
        points=points,
        uncertain=fit.uncertain,
    )
    return fit.coefficients_F.tolist(), report


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
