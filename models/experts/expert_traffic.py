"""What a cache of experts has read, and why."""

from __future__ import annotations

from collections import Counter
from typing import Final

DEMAND: Final = "demand"
USED_HINT: Final = "used_hint"
WASTED_HINT: Final = "wasted_hint"


class Traffic:
    """What was read, by cause, so far; hits and wanted: experts, by layer. waited_s: in which
    nothing was computed because experts were not there; copied_s: in which parts that had come
    were copied to their slots."""

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.wanted: Counter[int] = Counter()
        self.read_bytes = {DEMAND: 0, USED_HINT: 0, WASTED_HINT: 0}
        self.waited_s = self.copied_s = 0.0

    @property
    def cost_s(self) -> float:
        """What experts that were not there cost who computes."""
        return self.waited_s + self.copied_s

    def hit_fraction(self, layer: int) -> float:
        """Of the experts that the layer wanted so far; 0: none was."""
        return self.hits[layer] / max(1, self.wanted[layer])
