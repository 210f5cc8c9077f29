"""Section `kv`."""

from typing import Annotated

from msgspec import Meta

from contracts.config.section import Count, Section


class KvConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache of a rank, and sharing of prefixes."""

    block_tokens: Count = 16
    """Tokens per block. It is part of the block hash and equal on all ranks."""
    pool_tokens: Count | None = None
    """Capacity of a rank's pool in tokens. null: derived from free memory."""
    state_slots: Count | None = None
    """Recurrent states that a rank holds for models with such layers, of running sequences and at
    ends of prefixes. null: 4 per sequence of a batch, in at most half of the pools' memory."""
    memory_fraction: Annotated[float, Meta(gt=0, le=0.9)] | None = None
    """Fraction of free memory for KV pools if pool_tokens is null. null: 0.2 on CPUs, where the
    ranks of a node share it; 0.9 on a GPU, of what weights and the largest batch leave."""
    prefix_cache: bool = True
    """Keep blocks of earlier prompts and answers for reuse."""
    share_partial_blocks: bool = True
    """Reuse prefixes that end inside a block. false: whole blocks only."""
    share_between_keys: bool = False
    """Share prefixes between requests with different http.api_keys. If true, `cached_tokens` and
    response times reveal to a client what others have sent."""

    def fraction(self, *, on_gpu: bool) -> float:
        """Return `memory_fraction` or its default on the device."""
        default = 0.9 if on_gpu else 0.2
        return default if self.memory_fraction is None else self.memory_fraction
