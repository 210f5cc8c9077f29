"""Changes that a request's fields make to the model's logits before a token is chosen.

The order is vLLM's: choices or grammar, min_tokens, logit_bias, then repetition_penalty,
frequency_penalty and presence_penalty. Temperature, min_p, top_k and top_p follow in
actors/batching/finisher.py.
"""

from __future__ import annotations

import math
from collections import Counter, abc
from collections.abc import Iterable

import torch

from actors.batching.grammar_matcher import GrammarMatcher
from contracts.messages import Submit
from contracts.requests import Sampling
from contracts.token_trie import ChoiceMatcher

_INITIAL_CAPACITY = 64


class LogitsProcessor:
    """State of one sequence, kept across requeues because generated tokens stay.

    grammar: set before the first token if the request has one.
    """

    def __init__(self, submit: Submit, sampling: Sampling) -> None:
        self.grammar: GrammarMatcher | None = None
        self._sampling = sampling
        self._submit = submit
        self._matcher: ChoiceMatcher | None = None
        self._seen: TokenPenalties | None = None
        self._num_seen = submit.prompt_tokens  # tokens of the sequence in this state
        self._masked: torch.Tensor | None = None
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None

    def process(self, logits_V: torch.Tensor, token_ids: abc.Sequence[int]) -> torch.Tensor:
        """Return the changed logits for the token after `token_ids`, as a new tensor.

        `token_ids` begin with those of every earlier call. All logits are minus infinity if no
        token is allowed.
        """
        sampling = self._sampling
        if sampling.has_penalties and self._seen is None:
            prompt = self._prompt if sampling.repetition_penalty != 1 else ()
            self._seen = TokenPenalties(prompt, logits_V.device)
        if sampling.choices is not None and self._matcher is None:  # built on first use
            self._matcher = ChoiceMatcher(sampling.choices)
        self._update(token_ids)
        shaped_V = logits_V.to(torch.float32, copy=True)
        if self._matcher is not None:
            allowed = self._matcher.allowed_tokens(_valid_ids(self._submit.eos_token_ids, shaped_V))
            shaped_V = _mask_all_but(shaped_V, allowed)
        if self.grammar is not None:
            self.grammar.forbid(shaped_V)
        if len(token_ids) - self._submit.prompt_tokens < sampling.min_tokens:
            self._mask_endings(shaped_V)
        if sampling.logit_bias:
            self._add_biases(shaped_V, sampling.logit_bias)
        if self._seen is not None:
            self._seen.apply(shaped_V, sampling)
        return shaped_V

    def has_chosen(self, token_ids: abc.Sequence[int]) -> bool:
        """Return whether a choice or the grammar is complete and nothing can follow."""
        if self.grammar is not None:
            self.grammar.advance(token_ids[self._submit.prompt_tokens :])
            return self.grammar.is_complete
        if self._matcher is None:
            return False
        self._update(token_ids)
        return self._matcher.is_complete

    @property
    def _prompt(self) -> abc.Sequence[int]:
        return self._submit.token_ids[: self._submit.prompt_tokens]

    def _update(self, token_ids: abc.Sequence[int]) -> None:
        new = token_ids[self._num_seen :]
        if self._matcher is not None:
            for token in new:
                self._matcher.step(token)
        if self._seen is not None:
            self._seen.count_generated(new)
        self._num_seen = len(token_ids)

    def _mask_endings(self, shaped_V: torch.Tensor) -> None:
        if self._masked is None:
            ids = _valid_ids(self._submit.end_token_ids, shaped_V)
            self._masked = torch.tensor(ids, dtype=torch.int64, device=shaped_V.device)
        shaped_V[self._masked] = -math.inf

    def _add_biases(self, shaped_V: torch.Tensor, biases: dict[int, float]) -> None:
        if self._biases is None:
            ids = torch.tensor(list(biases), dtype=torch.int64, device=shaped_V.device)
            values = torch.tensor(list(biases.values()), device=shaped_V.device)
            self._biases = ids, values.float()
        ids_B, values_B = self._biases
        shaped_V[ids_B] += values_B


class TokenPenalties:
    """Distinct tokens with generated counts: a step is one operation over them."""

    def __init__(self, prompt: Iterable[int], device: torch.device) -> None:
        ids = list(dict.fromkeys(prompt))
        capacity = max(_INITIAL_CAPACITY, 2 * len(ids))
        self._place_of = {token: place for place, token in enumerate(ids)}
        self._ids_N = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._ids_N[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self._counts_N = torch.zeros(capacity, device=device)

    def count_generated(self, tokens: abc.Sequence[int]) -> None:
        """Count new tokens: one, or all that another rank generated."""
        for token, count in Counter(tokens).items():
            place = self._place_of.setdefault(token, len(self._place_of))
            if place == len(self._ids_N):
                self._ids_N = torch.cat([self._ids_N, torch.zeros_like(self._ids_N)])
                self._counts_N = torch.cat([self._counts_N, torch.zeros_like(self._counts_N)])
            self._ids_N[place] = token
            self._counts_N[place] += count

    def apply(self, logits_V: torch.Tensor, sampling: Sampling) -> None:
        seen = len(self._place_of)
        ids_N, counts_N = self._ids_N[:seen], self._counts_N[:seen]
        values_N, by = logits_V[ids_N], sampling.repetition_penalty
        if by != 1:
            values_N = torch.where(values_N > 0, values_N / by, values_N * by)
        values_N -= sampling.frequency_penalty * counts_N
        values_N -= sampling.presence_penalty * (counts_N > 0)
        logits_V[ids_N] = values_N


def logits_processor(submit: Submit) -> LogitsProcessor | None:
    """Return the processor of a request; None if it samples from the model's own logits."""
    sampling = submit.sampling
    return LogitsProcessor(submit, sampling) if sampling and sampling.modifies_logits else None


def _valid_ids(token_ids: Iterable[int], logits_V: torch.Tensor) -> list[int]:
    """Return the ids that have a logit: a model's eos tokens may lack one."""
    return [token for token in token_ids if 0 <= token < len(logits_V)]


def _mask_all_but(logits_V: torch.Tensor, allowed: list[int]) -> torch.Tensor:
    ids_A = torch.tensor(allowed, dtype=torch.int64, device=logits_V.device)
    kept_V = torch.full_like(logits_V, -math.inf)
    kept_V[ids_A] = logits_V[ids_A]
    return kept_V
