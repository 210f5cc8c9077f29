"""Long encodings in steps, which the caller schedules on threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

PIECE_CHARACTERS = 1 << 18  # per step: a fraction of a second
PIECE_TEXTS = 64

# Yields the number of kept tokens after each step, and returns the result.
EncodingSteps = Generator[int, None, Result]
Charge = Callable[[int], None]


def finish(steps: EncodingSteps[Result], charge: Charge | None = None) -> Result:
    """Run all steps. charge: called with the tokens of each step."""
    while True:
        try:
            tokens = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if charge is not None:
            charge(tokens)


def pieces_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of up to PIECE_TEXTS texts and PIECE_CHARACTERS; a longer text by itself."""
    piece: list[str] = []
    characters = 0
    for text in texts:
        if piece and (len(piece) == PIECE_TEXTS or characters + len(text) > PIECE_CHARACTERS):
            yield piece
            piece, characters = [], 0
        piece.append(text)
        characters += len(text)
    if piece:
        yield piece
