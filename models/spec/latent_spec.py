"""Multi-head latent attention (MLA) as config.json states it: DeepSeek-V2 and V3."""

from __future__ import annotations

import msgspec

from models.spec.config_fields import ConfigFields

_DEFAULT_Q_RANK = 1536  # where the key is missing; null says that there is none


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in elements. A head's query and key are `nope_dim` plain and `rope_dim` turned
    elements; a token's cache entry is kv_rank + rope_dim. `q_rank` None: queries are projected
    directly. `interleaved`: the pairs that rope turns are stored side by side."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def entry_dim(self) -> int:
        return self.kv_rank + self.rope_dim


def read_latent(config: ConfigFields, *, num_heads: int, always_interleaved: bool) -> LatentSpec:
    """Raises CheckpointError."""
    if config.positive_int("num_key_value_heads", default=num_heads) != num_heads:
        raise config.error(
            "num_key_value_heads",
            f"latent attention needs as many as num_attention_heads={num_heads}",
        )
    q_rank = None
    if not config.states_null("q_lora_rank"):
        q_rank = config.positive_int("q_lora_rank", default=_DEFAULT_Q_RANK)
    halves = config.states_null("rope_interleave")
    latent = LatentSpec(
        kv_rank=config.positive_int("kv_lora_rank"),
        q_rank=q_rank,
        nope_dim=config.positive_int("qk_nope_head_dim"),
        rope_dim=config.positive_int("qk_rope_head_dim"),
        value_dim=config.positive_int("v_head_dim"),
        interleaved=always_interleaved or config.boolean("rope_interleave", default=not halves),
    )
    if latent.rope_dim % 2:
        raise config.error("qk_rope_head_dim", f"{latent.rope_dim} is odd; rope needs an even size")
    return latent
