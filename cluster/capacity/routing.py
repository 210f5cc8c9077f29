"""`tandem profile --routing`: what foretells a checkpoint's routing, from texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from contracts.errors import ConfigError
from models.decoder.decoder import AttentionHalf
from models.experts.copying_store import CopyingStore
from models.experts.expert_layout import ExpertLayout
from models.experts.host_experts import open_host_source
from models.foresight.routing_collection import Collection
from models.foresight.routing_profile import RoutingProfile
from models.spec.model import ModelSpec
from models.text.tokenizer import Tokenizer
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype

LEAST_TOKENS: Final = 1000
_DEADLINE_S: Final = 600.0  # to make the file of experts, or to read a layer's


class RoutingSettings(NamedTuple):
    """most_tokens: of all texts together; of one at most row_tokens."""

    model_folder: Path
    dtype: Literal["auto", "bfloat16", "float32"]
    most_tokens: int = 60_000
    row_tokens: int = 512


class RoutingReport(NamedTuple):
    """tokens: that were looked at."""

    profile: RoutingProfile
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
        return RoutingReport(Collection(half, store, rows, progress).profile(), spec, tokens)
    finally:
        store.close()


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
