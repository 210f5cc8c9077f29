"""The saturation threshold tau: the work that hides a worker's transfer of expert weights.

MoE-Prefill, Section 6.2 and Appendix B.4; docs/notation.md describes the reconstruction of the
equations.
"""

import math
from typing import NamedTuple

from contracts.config import PrefillConfig
from contracts.routing_messages import Calibration
from planner.routing.open_requests import RequestWork

MARGIN_FRACTION = 0.1  # the paper's gamma: jitter of transfers
REFERENCE_PROMPT_TOKENS = 512


class SaturationConfig(NamedTuple):
    """Configuration of the threshold.

    pinned: a fixed threshold that replaces calibration. fallback_prompts: the reference batch that
    is assumed without a calibration.
    """

    fallback_prompts: tuple[int, ...]
    margin_fraction: float = MARGIN_FRACTION
    pinned: int | None = None


def saturation_of(prefill: PrefillConfig, context_tokens: int) -> SaturationConfig:
    """Return the configuration, which is equal on the router and its workers."""
    return SaturationConfig(
        fallback_prompts=reference_prompts(prefill.max_batch_tokens, context_tokens),
        margin_fraction=prefill.saturation_margin,
        pinned=prefill.saturation,
    )


def reference_prompts(max_tokens: int, context_tokens: int) -> tuple[int, ...]:
    """Return the prompt lengths of a reference batch of `max_tokens`."""
    length = min(max_tokens, context_tokens, REFERENCE_PROMPT_TOKENS)
    whole, rest = divmod(max_tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def threshold(config: SaturationConfig, work: RequestWork, calibration: Calibration | None) -> int:
    """Return the threshold: pinned, or (1 + gamma) * t_max / t_0 * F_ref (Eq. 3).

    t_max / t_0: of a reference pass, 1 without any. F_ref uses the router's own `work`, so
    threshold and load have one unit.
    """
    if config.pinned is not None:
        return config.pinned
    stretch, prompts = 1.0, config.fallback_prompts
    if calibration is not None:
        stretch = calibration.slowest_layer_s / calibration.first_layer_s
        prompts = calibration.reference_prompts
    reference = sum(work(0, tokens) for tokens in prompts)
    return max(1, math.ceil((1 + config.margin_fraction) * stretch * reference))
