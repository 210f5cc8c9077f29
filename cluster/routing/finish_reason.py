"""How a generation ends, as its tokens tell it."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.choice_matcher import ChoiceMatcher
from contracts.messages import Submit


def finish_reason_of(submit: Submit) -> str | None:
    """Why nothing comes after what has been generated, "stop" or "length", as the rank that
    generated it would have said (actors/batching/finisher.py); None: more is to come."""
    sampling = submit.sampling
    if sampling is None or not submit.generated:
        return None
    generated = submit.token_ids[submit.prompt_tokens :]
    if generated[-1] in submit.end_token_ids:
        return "stop"
    if sampling.choices is not None and _completes_choice(sampling.choices, generated):
        return "stop"
    return "length" if submit.generated >= sampling.max_tokens else None


def _completes_choice(choices: Sequence[Sequence[int]], generated: Sequence[int]) -> bool:
    matcher = ChoiceMatcher(choices)
    for token in generated:
        matcher.step(token)
    return matcher.is_complete
