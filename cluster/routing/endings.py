"""How a generation ends, as its tokens tell it."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.choice_way import ChoiceWay
from contracts.messages import Submit


def ending_of(submit: Submit) -> str | None:
    """Why nothing comes after what has been generated, "stop" or "length", as the rank that
    generated it would have said (actors/batching/finisher.py); None: more is to come."""
    sampling = submit.sampling
    if sampling is None or not submit.generated:
        return None
    generated = submit.token_ids[submit.prompt_tokens :]
    if generated[-1] in submit.ending_ids:
        return "stop"
    if sampling.choices is not None and _has_chosen(sampling.choices, generated):
        return "stop"
    return "length" if submit.generated >= sampling.max_tokens else None


def _has_chosen(choices: Sequence[Sequence[int]], generated: Sequence[int]) -> bool:
    way = ChoiceWay(choices)
    for token in generated:
        way.step(token)
    return way.at_end
