"""Which part of a prompt has a say in how the tokens behind it are cut."""

from __future__ import annotations

END_CHARACTERS = 64


def end_of(stem: str) -> str:
    """The last line of `stem` if it is short, or else its last END_CHARACTERS and up to a space
    between a word and a letter: no tokenizer of words looks across either. Empty where there is no
    such place."""
    line = stem.rfind("\n") + 1
    if line > 0 and len(stem) - line <= END_CHARACTERS // 2 and stem[line : line + 1].isalpha():
        return stem[line:]
    at = len(stem) - END_CHARACTERS
    while (at := stem.rfind(" ", END_CHARACTERS, at)) > 0:
        if stem[at - 1].isalnum() and stem[at + 1].isalpha():
            return stem[at:]
    return ""
