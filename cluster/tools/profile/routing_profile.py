"""`tandem profile --routing`: a profile of a checkpoint's routing, from texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from cluster.observe.terminal import Terminal, plain_table
from contracts.errors import ConfigError
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.prediction.profile_builder import ProfileBuilder
from models.prediction.routing_counts import (
    MIN_TOKENS,
    CountLimits,
    RoutingCounter,
    RoutingCounts,
)
from models.prediction.routing_profile import PREDICTOR_KINDS, RoutingProfile
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype

MEASUREMENT_LIMITS: Final = CountLimits(pairs=1 << 17, paths=1 << 16)  # larger than the file's
ROW_TOKENS: Final = 512  # of one text
_DEADLINE_S: Final = 600.0  # to write the file of experts, or to read a layer's


class LayerPrecision(NamedTuple):
    """The fraction of a layer's experts that each kind of guess predicts on texts held out."""

    layer: int
    hit_fraction: dict[str, float]


class RoutingReport(NamedTuple):
    """tokens: of the texts; four fifths of these are counted."""

    profile: RoutingProfile
    counts: RoutingCounts
    tokens: int

    @property
    def layers(self) -> list[LayerPrecision]:
        precision = self.profile.precision
        return [
            LayerPrecision(
                layer, {kind: float(precision[kind][layer].mean()) for kind in PREDICTOR_KINDS}
            )
            for layer in list(self.profile.means)[1:]
        ]


def routing_profile(
    folder: Path,
    dtype_name: Literal["auto", "bfloat16", "float32"],
    texts: Iterable[str],
    *,
    most_tokens: int,
    limits: CountLimits,
    progress: Callable[[float], None],
) -> RoutingReport:
    """Run the model on the CPU with streamed experts, so that it may be larger than memory.

    most_tokens: of all texts together. limits: of the counts in the file. progress: called with
    the completed fraction. Raises CheckpointError, ResourceError, ConfigError.
    """
    spec, checkpoint = check_checkpoint(folder), Checkpoint(folder)
    dtype = resolve_dtype(spec, dtype_name)
    rows = list(_rows(Tokenizer.load(folder), texts, most_tokens))
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
        counter = RoutingCounter(folder, spec, MEASUREMENT_LIMITS)
        profile = ProfileBuilder(half, store, rows, progress, counter).profile()
        return RoutingReport(profile, counter.counts().truncate(limits), tokens)
    finally:
        store.close()


def merge_counts(
    counts: RoutingCounts | None, files: Sequence[Path], folder: Path
) -> RoutingCounts:
    """Add the counts of the files to `counts`; one of both is given. Raises CheckpointError."""
    spec = check_checkpoint(folder)
    for path in files:
        other = RoutingCounts.read(path, folder, spec, min_tokens=1)
        counts = other if counts is None else counts.merge(other)
    assert counts is not None
    return counts


def _rows(tokenizer: Tokenizer, texts: Iterable[str], left: int) -> Iterator[Sequence[int]]:
    for text in texts:
        ids = tokenizer.encode(text)[: min(ROW_TOKENS, left)]
        if len(ids) > 1:
            yield ids
            left -= len(ids)
        if left <= 1:
            return


def print_routing(report: RoutingReport) -> None:
    table = plain_table("layer", *PREDICTOR_KINDS)
    table.title = (
        "fraction of experts that guesses made in the layer before predict, on held-out text"
    )
    for precision in report.layers:
        found = (f"{precision.hit_fraction[kind]:.3f}" for kind in PREDICTOR_KINDS)
        table.add_row(str(precision.layer), *found)
    console = Terminal()
    console.print(f"{report.counts.counted} of {report.tokens} tokens counted")
    console.print(table)
