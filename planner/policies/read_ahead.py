"""Whether to begin to read an expert that may be wanted."""

from __future__ import annotations


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """What is won if the guess is right, against what is lost if it is wrong
    (contracts/expert_slots.py)."""
    return precision * hidden_s > (1.0 - precision) * wait_s
