"""`tandem profile --routing`: what foretells a checkpoint's routing, from texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from cluster.capacity.routing_judged import Judged, judge
from contracts.errors import ConfigError
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.foresight.profile_file import digest_of
from models.foresight.routing_collection import Collection, Counters
from models.foresight.routing_counter import Counted, RoutingCounter
from models.foresight.routing_counts import LEAST_TOKENS, LIMITS, Limits, RoutingCounts
from models.foresight.routing_profile import RoutingProfile
from models.foresight.signals import AFTER, KINDS
from models.foresight.unseen import Nearest
from models.spec.model import ModelSpec
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import tokenizer_digest
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype

WHILE_MEASURING: Final = Limits(pairs=1 << 17, paths=1 << 16)
"""Larger than the file's: what is printed is judged with all of it."""
HELD_OUT: Final = Limits(pairs=4096, paths=1 << 16)  # whose paths alone are looked at
_DEADLINE_S: Final = 600.0  # to make the file of experts, or to read a layer's


class RoutingSettings(NamedTuple):
    """most_tokens: of all texts together; of one at most row_tokens. limits: of what is counted,
    in the file."""

    model_folder: Path
    dtype: Literal["auto", "bfloat16", "float32"]
    most_tokens: int = 60_000
    row_tokens: int = 512
    limits: Limits = LIMITS


class RoutingReport(NamedTuple):
    """counts: as they go into the file. tokens: that were looked at."""

    profile: RoutingProfile
    counts: RoutingCounts
    judged: Judged
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
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"--input: {tokens} tokens of text; a profile of routing needs at least {LEAST_TOKENS}"
        )
    layout = ExpertLayout(spec, dtype, torch.device("cpu"))
    source = open_host_source(folder, layout, store=None, deadline_s=_DEADLINE_S)
    store = CopyingStore(source, {}, layout, deadline_s=_DEADLINE_S)
    try:
        half = AttentionHalf.load(checkpoint, spec, dtype=dtype)
        counters = Counters(
            _counter(folder, spec, WHILE_MEASURING), _counter(folder, spec, HELD_OUT)
        )
        profile = Collection(half, store, rows, progress, counters).profile()
        counts, held_out = counters.kept.counts(), counters.held_out.counts()
        judged = judge(counts, held_out, _means(profile), Nearest(half.embedding))
        return RoutingReport(profile, counts.bounded(settings.limits), judged, spec, tokens)
    finally:
        store.close()


def _means(profile: RoutingProfile) -> dict[str, dict[int, float]]:
    """By kind of guess and layer: how often one was right."""
    return {
        kind: {
            layer: float(profile.precision[kind][layer].mean()) for layer in list(profile.means)[1:]
        }
        for kind in (*KINDS, AFTER)
    }


def _counter(folder: Path, spec: ModelSpec, limits: Limits) -> RoutingCounter:
    of = Counted(
        digest_of(folder),
        tokenizer_digest(folder),
        spec.moe_layers,
        spec.num_experts,
        spec.top_k,
        spec.vocab_size,
    )
    return RoutingCounter(of, limits)


def added(counts: RoutingCounts | None, files: Sequence[Path], folder: Path) -> RoutingCounts:
    """`counts` and those of the files; one of them is given. Raises CheckpointError."""
    spec = check_checkpoint(folder)
    for path in files:
        other = RoutingCounts.read(path, folder, spec, least_tokens=1)
        counts = other if counts is None else counts.plus(other)
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
