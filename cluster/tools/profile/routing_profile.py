"""`tandem profile --routing`: what foretells a checkpoint's routing, from texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from cluster.tools.profile.routing_quality import RoutingQuality, evaluate_routing
from contracts.errors import ConfigError
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.prediction.count_predictor import NearestTokens
from models.prediction.profile_builder import ProfileBuilder, SplitCounters
from models.prediction.profile_file import checkpoint_digest
from models.prediction.routing_counter import CountedModel, RoutingCounter
from models.prediction.routing_counts import COUNT_LIMITS, MIN_TOKENS, CountLimits, RoutingCounts
from models.prediction.routing_profile import RoutingProfile
from models.prediction.signals import AFTER, PREDICTOR_KINDS
from models.spec.model import ModelSpec
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import tokenizer_digest
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype

MEASUREMENT_LIMITS: Final = CountLimits(pairs=1 << 17, paths=1 << 16)
"""Larger than the file's: what is printed is judged with all of it."""
HELD_OUT_LIMITS: Final = CountLimits(pairs=4096, paths=1 << 16)  # whose paths alone are looked at
_DEADLINE_S: Final = 600.0  # to make the file of experts, or to read a layer's


class RoutingSettings(NamedTuple):
    """most_tokens: of all texts together; of one at most row_tokens. limits: of what is counted,
    in the file."""

    model_folder: Path
    dtype: Literal["auto", "bfloat16", "float32"]
    most_tokens: int = 60_000
    row_tokens: int = 512
    limits: CountLimits = COUNT_LIMITS


class RoutingReport(NamedTuple):
    """counts: as they go into the file. tokens: that were looked at."""

    profile: RoutingProfile
    counts: RoutingCounts
    quality: RoutingQuality
    spec: ModelSpec
    tokens: int


def routing_profile(
    settings: RoutingSettings,
    texts: Iterable[str],
    progress: Callable[[float], None] = lambda part: None,
) -> RoutingReport:
    """On the CPU; layers' experts are streamed, so that a model larger than memory can be profiled.
    progress: told the part that is done. Raises CheckpointError, ResourceError, ConfigError."""
    folder = settings.model_folder
    spec, checkpoint = check_checkpoint(folder), Checkpoint(folder)
    dtype = resolve_dtype(spec, settings.dtype)
    rows = list(_rows(Tokenizer.load(folder), texts, settings))
    tokens = sum(map(len, rows))
    if tokens < MIN_TOKENS:
        raise ConfigError(
            f"--input: {tokens} tokens of text; a profile of routing needs at least {MIN_TOKENS}"
        )
    layout = ExpertLayout(spec, dtype, torch.device("cpu"))
    source = open_host_source(folder, layout, store=None, deadline_s=_DEADLINE_S)
    store = CopyingStore(source, {}, layout, deadline_s=_DEADLINE_S)
    try:
        half = AttentionHalf.load(checkpoint, spec, dtype=dtype)
        counters = SplitCounters(
            _counter(folder, spec, MEASUREMENT_LIMITS), _counter(folder, spec, HELD_OUT_LIMITS)
        )
        profile = ProfileBuilder(half, store, rows, progress, counters).profile()
        counts, held_out = counters.kept.counts(), counters.held_out.counts()
        quality = evaluate_routing(counts, held_out, _means(profile), NearestTokens(half.embedding))
        return RoutingReport(profile, counts.truncate(settings.limits), quality, spec, tokens)
    finally:
        store.close()


def _means(profile: RoutingProfile) -> dict[str, dict[int, float]]:
    """By kind of guess and layer: how often one was right."""
    return {
        kind: {
            layer: float(profile.precision[kind][layer].mean()) for layer in list(profile.means)[1:]
        }
        for kind in (*PREDICTOR_KINDS, AFTER)
    }


def _counter(folder: Path, spec: ModelSpec, limits: CountLimits) -> RoutingCounter:
    of = CountedModel(
        checkpoint_digest(folder),
        tokenizer_digest(folder),
        spec.moe_layers,
        spec.num_experts,
        spec.top_k,
        spec.vocab_size,
    )
    return RoutingCounter(of, limits)


def merge_counts(
    counts: RoutingCounts | None, files: Sequence[Path], folder: Path
) -> RoutingCounts:
    """`counts` and those of the files; one of them is given. Raises CheckpointError."""
    spec = check_checkpoint(folder)
    for path in files:
        other = RoutingCounts.read(path, folder, spec, min_tokens=1)
        counts = other if counts is None else counts.merge(other)
    assert counts is not None
    return counts


def _rows(
    tokenizer: Tokenizer, texts: Iterable[str], settings: RoutingSettings
) -> Iterator[Sequence[int]]:
    left = settings.most_tokens
    for text in texts:
        ids = tokenizer.encode(text)[: min(settings.row_tokens, left)]
        if len(ids) > 1:
            yield ids
            left -= len(ids)
        if left <= 1:
            return
