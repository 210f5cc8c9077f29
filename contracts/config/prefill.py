"""Section `prefill`."""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.config.section import Count, OutputFolder, Section

SCALABLE = ("resident", "streamed", "cached")  # modes in which a worker needs no other worker


class PrefillConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of the prefill pipeline (groups.prefill_ranks)."""

    experts: Literal[
        "resident", "gathered", "streamed", "hybrid", "all_to_all", "shuffled", "cached"
    ] = "resident"
    """Storage of expert weights. "resident": all in the worker's memory. "gathered": 1/N of each
    layer in memory, the rest fetched from other workers during compute. "streamed": read from a
    host store during compute. "hybrid": 1/N from the host store, the rest gathered. "all_to_all":
    1/N in memory, activations are exchanged instead of weights (the DP+EP baseline). "shuffled": as
    "gathered", but idle workers compute a long prompt together. "cached": as many as section
    `experts` allows, the others read on demand from a file in host_store, or from pinned host
    memory on a GPU."""
    resident_layers: Count = 1
    """Layers whose experts stay in memory in every mode, starting with the first."""
    shard_prefetch_layers: Count = 2
    """Layers that a worker reads ahead from the host store with "hybrid"."""
    host_store: OutputFolder | None = None
    """Folder for the expert file of "streamed" and "hybrid". The file is created if the checkpoint
    stores experts in another layout. null: the system's temporary folder."""
    locality_weight: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Load, in multiples of a request's work, that routing accepts with "all_to_all" for a worker
    that has all experts predicted for the prompt, and in proportion for a part of them. Predictions
    come from experts.profile. 0: route by prefix and load alone."""
    packed_experts: bool = True
    """Transfer experts in the layout of the processor's kernels. false: as plain matrices, for
    workers on different processors."""
    disable_kv_cache: bool = False
    """Run workers without KV pool and prefix cache. Prefixes are then shared within a batch
    only."""
    max_batch_tokens: Count = 4096
    """Maximum tokens of a batch on a prefill worker."""
    max_batch_sequences: Count = 256
    """Maximum sequences of a batch on a prefill worker."""
    saturation: Count | None = None
    """Saturation threshold of a worker in FLOPs of queued work. null: calibrated at run time."""
    saturation_margin: Annotated[float, Meta(ge=0, le=10)] = 0.1
    """Fraction added to the calibrated saturation threshold (gamma in Eq. 1), which is the work
    that hides all transfers."""
    engine: str = "torch"
    """Compute engine: "torch", or package.module:function that makes the worker, for tests."""
