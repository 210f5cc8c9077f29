"""Section `experts`."""

from typing import Literal

from contracts.config.section import Count, InputPath, Section


class ExpertsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts that do not fit into memory.

    The section applies to expert ranks if `slots` or `bytes` is set, and to prefill workers with
    prefill.experts=cached; `storage_format` also to resident experts.
    """

    slots: Count | None = None
    """Experts that a worker keeps in memory, over all layers. null: see `bytes`."""
    bytes: Count | None = None
    """Bytes of experts that a worker keeps in memory. null: see `slots`. If both are null, an
    expert rank keeps all of its experts."""
    storage_format: bool | None = None
    """Keep experts in the checkpoint's format (fp8, int8, MXFP4, bfloat16 for float32), which
    products unpack: more experts fit, generation reads fewer bytes, answers are equal. `bytes`
    counts stored bytes. null: on CPUs without matrix units for model.dtype."""
    eviction_policy: Literal["walk", "lru"] = "walk"
    """Expert to evict first. "walk": the least recently used one of the layer whose next use is
    farthest away. "lru": least recently used."""
    predictor: Literal["none", "router", "fitted", "quasi", "estimator"] | None = None
    """Predictor of the next layer's experts, which are prefetched. "router": the next layer's
    router on this layer's state. "fitted": a least-squares fit. "quasi": the next router, with the
    mean output of this layer's experts added. "estimator": a small network. null: the best one of
    the profile for each layer; without a profile "router"."""
    speculative: Literal["exact", "speculated"] = "exact"
    """Experts of generated tokens. "speculated": the predicted experts instead of the router's
    choice, which is a different model and is reported in /v1/models. Prompts are always exact."""
    speculative_layers: tuple[int, ...] | None = None
    """Layers with speculation. null: all layers that follow another layer with experts."""
    speculative_weights: Literal["router", "predicted"] = "router"
    """Weights of speculated experts. "router": from the layer's router. "predicted": from the
    prediction, as in the paper."""
    profile: InputPath | None = None
    """File written by `tandem profile --routing`. null: routing.safetensors beside the checkpoint,
    if present; the bundled model has one."""
    direct_io: bool | None = None
    """Read experts past the page cache. null: only if their file is larger than free memory."""

    @property
    def is_bounded(self) -> bool:
        """True if the number of experts in memory is limited."""
        return self.slots is not None or self.bytes is not None

    def __post_init__(self) -> None:
        if self.slots is not None and self.bytes is not None:
            raise ValueError(
                f"experts.slots={self.slots} and experts.bytes={self.bytes}: give one of them"
            )
        if self.speculative == "speculated" and not self.is_bounded:
            raise ValueError(
                "experts.speculative=speculated: where all experts are resident nothing is "
                "predicted: set experts.slots or experts.bytes, or experts.speculative=exact"
            )
        if self.speculative == "speculated" and self.predictor == "none":
            raise ValueError(
                "experts.speculative=speculated runs what is predicted, and "
                "experts.predictor=none: set experts.predictor to null"
            )
