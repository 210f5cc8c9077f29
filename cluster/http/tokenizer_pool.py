"""Long texts in threads of their own, a piece at a time: requests take turns, and one whose client
has left stops after the piece that it is at.

    request A   [piece] [piece] [piece] ...        each a task of the pool, made when the one
    request B           [piece] ...                before it is done: so none holds all threads

Best-effort requests have a thread of their own, and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from contracts.requests import Priority
from models.text.encoding_steps import Charge, EncodingSteps, finish
from models.text.tokenizer import THREAD_ABOVE_CHARACTERS, Tokenizer

Result = TypeVar("Result")


class _Done(NamedTuple):
    value: object


class TokenizerPool:
    """Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self.tokenizer = tokenizer
        self._pools = {
            Priority.LS: ThreadPoolExecutor(threads, thread_name_prefix="tokenizing"),
            Priority.BE: ThreadPoolExecutor(1, thread_name_prefix="tokenizing-be"),
        }

    async def run(
        self,
        steps: EncodingSteps[Result],
        characters: int,
        charge: Charge,
        priority: Priority = Priority.LS,
    ) -> Result:
        """The result of `steps`. characters: about how many go through them; few are worth no
        thread. charge: told the tokens of each step; what it raises ends them."""
        if characters <= THREAD_ABOVE_CHARACTERS:
            return finish(steps, charge)
        loop = asyncio.get_running_loop()
        while True:
            done = await loop.run_in_executor(self._pools[priority], _advance, steps)
            if isinstance(done, _Done):
                return done.value  # type: ignore[return-value]
            charge(done)

    async def encode(
        self,
        texts: Iterable[str],
        charge: Charge,
        *,
        param: str,
        characters: int,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: Priority = Priority.LS,
    ) -> list[list[int]]:
        """As `Tokenizer.encode_steps`. characters: of all texts."""
        steps = self.tokenizer.encode_steps(
            texts, param=param, max_tokens=max_tokens, add_special_tokens=add_special_tokens
        )
        return await self.run(steps, characters, charge, priority)


def _advance(steps: EncodingSteps[object]) -> int | _Done:
    """One step: the tokens that it made, or the result. (A future cannot hold a StopIteration.)"""
    try:
        return next(steps)
    except StopIteration as end:
        return _Done(end.value)
