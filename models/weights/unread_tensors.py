"""Tensors of a checkpoint that no part of a decoder reads.

One that nobody reads is a part of the model that we would leave out: a bias, a norm, a layer. So
it is an error, but for those of which it is known that the logits do not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from contracts.errors import CheckpointError
from models.spec.model import ModelSpec

_FP8_SCALE = "_scale_inv"
_INVERSE_FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # we make them of config.json
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def refuse_unread(
    folder: Path, spec: ModelSpec, stored: Collection[str], read: Collection[str]
) -> None:
    """Raises CheckpointError: one line with the number of tensors that are stored and not read,
    and the first of them."""
    unread = sorted(name for name in stored if name not in read and not _harmless(spec, name, read))
    if unread:
        others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{folder}: tensor {unread[0]}{others} in the checkpoint would be left out of a"
            f" {spec.architecture} as config.json describes it, and the answers would be wrong;"
            " use the config.json that belongs to these weights"
        )


def _harmless(spec: ModelSpec, name: str, read: Collection[str]) -> bool:
    if name.endswith(_FP8_SCALE) and name.removesuffix(_FP8_SCALE) in read:
        return True
    if _INVERSE_FREQUENCIES.search(name):
        return True
    layer = _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= spec.num_layers
    return beyond and spec.family.has_prediction_layers
