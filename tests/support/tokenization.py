"""Continuations of prompts, encoded at once."""

from collections.abc import Sequence

from models.text.chat_template import finish
from models.text.tokenizer import Tokenizer


def continuations(
    tokenizer: Tokenizer, prompt: str, texts: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """Return the ids of the prompt and of each text behind it."""
    return finish(tokenizer.continuation_steps([(prompt, texts)], param="prompt"))[0]
