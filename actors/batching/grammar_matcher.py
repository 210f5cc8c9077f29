"""Grammars of the sequences of one rank: compilation and masks, beside the loop thread.

    loop thread   admit ........ prefill ... sample t1, advance | next pass ...... | sample t2
    compiling       compile, mask                               |                  |
    masking                                                     | masks of all     |

A mask depends on the last token only, so it is made while the model computes the next logits.
Masks that take less time than another thread needs to start are made when they are needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from contracts.errors import RequestError
from models.text.grammar import error_of, new_matcher

_MAX_COMPILED = 16  # grammars kept for later sequences
_NEWEST = 0.1  # weight of the latest time
_SHORT_S = 1e-4  # of all masks of a batch
_MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class GrammarMatchers:
    """Compiler of one rank's grammars.

    tokenizer: None if the model has none that can be used; grammars are then refused. vocabulary:
    the model's number of logits. on_compiled: called in the compiling thread.
    """

    def __init__(
        self, tokenizer: LLTokenizer | None, vocabulary: int, on_compiled: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._on_compiled = on_compiled
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor: LLExecutor | None = None
        self._mask_s = _SHORT_S  # mean time of a mask
        self._compiled: dict[str, LLMatcher] = {}  # the latest last

    def start(self, grammar: str, generated: Sequence[int]) -> GrammarMatcher:
        """Return a matcher of what follows the `generated` tokens. Raises RequestError."""
        if self._tokenizer is None:
            raise RequestError("grammar: this model's tokenizer is not supported", "grammar")
        known = self._compiled.get(grammar)
        if known is None or generated:
            compiled = self._compiling.submit(self._compile, grammar, list(generated))
            compiled.add_done_callback(lambda _: self._on_compiled())
        else:
            compiled = Future()
            compiled.set_result(known.deep_copy())
        return GrammarMatcher(self, compiled, len(generated))

    def _compile(self, grammar: str, generated: list[int]) -> LLMatcher:
        assert self._tokenizer is not None
        first = self._compiled.pop(grammar, None)
        if first is None:
            first = new_matcher(self._tokenizer, grammar)
            first.compute_bitmask()
        if not first.is_error():
            self._compiled[grammar] = first  # as the latest
        if len(self._compiled) > _MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        matcher = first.deep_copy()
        matcher.consume_tokens(generated)
        return matcher

    def prepare_masks(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Start to make the next masks of some matchers, a row for each, unless they are quick."""
        if len(matchers) * self._mask_s < _SHORT_S:
            return
        masks = self._masking.submit(self._forbidden, [matcher.inner for matcher in matchers])
        for row, matcher in enumerate(matchers):
            matcher.set_mask(masks, row)

    def forbidden(self, matcher: LLMatcher) -> torch.Tensor:
        """Return the tokens that cannot come next."""
        start_s = time.perf_counter()
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = self._unpacked(allowed[None])[0]
        self._note_time(time.perf_counter() - start_s)
        return found

    def _note_time(self, mask_s: float) -> None:
        self._mask_s += _NEWEST * (mask_s - self._mask_s)

    def _unpacked(self, masks: NDArray[np.uint8]) -> torch.Tensor:
        # a model may have more logits than its tokenizer has tokens
        allowed = np.unpackbits(masks, axis=1, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(allowed == 0)

    def _forbidden(self, matchers: list[LLMatcher]) -> torch.Tensor:
        """Return the tokens that cannot come next, a row for each matcher."""
        assert self._tokenizer is not None
        if self._executor is None:
            self._executor = LLExecutor(_MASK_THREADS)
        masks = np.zeros((len(matchers), -(-self._tokenizer.vocab_size // 32)), np.int32)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        start_s = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(rows)
        )
        found = self._unpacked(masks.view(np.uint8))
        self._note_time((time.perf_counter() - start_s) / len(matchers))
        return found


class GrammarMatcher:
    """Progress of one sequence through its grammar."""

    def __init__(self, owner: GrammarMatchers, compiled: Future[LLMatcher], consumed: int) -> None:
        self.owner = owner
        self._compiled = compiled
        self._consumed = consumed  # generated tokens that the matcher has seen
        self._masks: Future[torch.Tensor] | None = None
        self._row = 0
        self._is_complete: bool | None = None

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    @property
    def inner(self) -> LLMatcher:
        """The library's matcher. Waits for its compilation."""
        return self._compiled.result()

    def advance(self, generated: Sequence[int]) -> None:
        """Consume those of the generated tokens that are new; their mask is no longer needed."""
        for token in generated[self._consumed :]:
            self.inner.consume_token(token)
        self._masks, self._is_complete = None, None
        self._consumed = len(generated)

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow."""
        if self._is_complete is None:  # not read while a mask is made
            self._is_complete = self.inner.is_stopped() and not self.inner.is_error()
        return self._is_complete

    def set_mask(self, masks: Future[torch.Tensor], row: int) -> None:
        self._masks, self._row = masks, row

    def forbid(self, logits_V: torch.Tensor) -> None:
        """Mask, in place, the tokens that cannot come next. Raises RequestError."""
        if self._masks is None:
            forbidden_V = self.owner.forbidden(self.inner)
        else:
            forbidden_V = self._masks.result()[self._row]
        error = error_of(self.inner)
        if error:
            raise RequestError(f"grammar: {error}", "grammar")
        logits_V.masked_fill_(forbidden_V.to(logits_V.device), -torch.inf)
