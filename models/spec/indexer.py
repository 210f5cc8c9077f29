"""Indexers of sparse latent attention, from config.json."""

from __future__ import annotations

import msgspec

from models.spec.config_fields import ConfigFields
from models.spec.family import Family

_MODES = {"F": "full", "S": "shared"}
_INDEXED = "indexed_attention"


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A query sees the `top_k` tokens with the highest scores of `heads` heads of `head_dim`.

    `interleaved`: the pairs that rope rotates are side by side. `shared_layers` use the selection
    of the layer before them.
    """

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    shared_layers: tuple[int, ...] = ()


def read_indexer(config: ConfigFields, family: Family, num_layers: int) -> IndexerSpec:
    """Read the sizes. Raises CheckpointError."""
    if config.raw("layer_types") not in (None, [_INDEXED] * num_layers):
        raise config.error("layer_types", f"expected {num_layers} times {_INDEXED!r}")
    if config.is_null("q_lora_rank"):
        raise config.error("q_lora_rank", "null is not supported with an indexer")
    interleaved = family.indexer == "interleaved"
    modes = _read_modes(config, num_layers) if interleaved else ["full"] * num_layers
    indexer = IndexerSpec(
        heads=config.positive_int("index_n_heads", default=family.default_index_heads),
        head_dim=config.positive_int("index_head_dim", default=128),
        top_k=config.positive_int("index_topk", default=2048),
        interleaved=interleaved,
        shared_layers=tuple(layer for layer, mode in enumerate(modes) if mode == "shared"),
    )
    rope_dim = config.positive_int("qk_rope_head_dim")
    if indexer.head_dim < rope_dim:
        raise config.error(
            "index_head_dim", f"{indexer.head_dim} is less than qk_rope_head_dim={rope_dim}"
        )
    return indexer


def _read_modes(config: ConfigFields, num_layers: int) -> list[str]:
    """Return `full` or `shared` of each layer; GLM's own keys have a period and an offset."""
    key = "indexer_types" if config.has("indexer_types") else "index_topk_pattern"
    modes = config.raw(key)
    if modes is None:
        every = config.positive_int("index_topk_freq", default=1)
        offset = config.count("index_skip_topk_offset", default=2)
        firsts = [max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers)]
        modes = ["full" if is_first else "shared" for is_first in firsts]
    modes = [_MODES.get(mode, mode) for mode in modes]
    if len(modes) != num_layers or not {*modes} <= {*_MODES.values()} or modes[0] != "full":
        raise config.error(key, f"expected {num_layers} times full or shared, got {modes!r}")
    return modes
