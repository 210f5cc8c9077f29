"""Whether to begin to read an expert that may be wanted."""

from __future__ import annotations


def pays(precision: float, hidden_s: float, wait_s: float) -> bool:
    """What is won if the guess is right, against what is lost if it is wrong
    (contracts/expert_slots.py)."""
    return precision * hidden_s > (1.0 - precision) * wait_s


def expected_active(experts: int, top_k: int, tokens: int) -> float:
    """Experts of a layer that so many tokens go to, where routing is even: E (1 - (1 - k/E)^B)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)
