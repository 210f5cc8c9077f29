"""Greedy decoding with a `transformers` model as the oracle, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def greedy_choices(oracle: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The likeliest token after the prompt, and after each of `tokens` but the last.

    Equal to `tokens` if and only if greedy decoding gives `tokens`.
    """
    with torch.no_grad():
        logits_TV = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    choices: list[int] = logits_TV[len(prompt) - 1 :].argmax(-1).tolist()
    return choices
