"""Guesses are made while they save more than they cost."""

from __future__ import annotations

from typing import Any

import torch

from actors.moe.backend import TaskKey
from actors.moe.prefetcher import ExpertPrefetcher
from contracts.requests import Priority


class Guessing:
    """A foresight whose every call takes `takes_s`; `now_s` is its clock."""

    def __init__(self, takes_s: float, *, speculates: bool = False) -> None:
        self.now_s, self.calls = 0.0, 0
        self.speculates, self._takes_s = speculates, takes_s

    def predict_first(self, token_ids_T: torch.Tensor) -> None:
        self.now_s += self._takes_s
        self.calls += 1


class Worker:
    """Waits for `waits_s` in a pass for experts; for `hidden_s` less where it has guessed."""

    def __init__(self, predictor: Guessing, hidden_s: float, waits_s: float = 1.0) -> None:
        self._predictor, self._hidden_s, self._waits_s = predictor, hidden_s, waits_s
        self._spent_s = 0.0
        known: Any = predictor
        self._ahead = ExpertPrefetcher(
            known,
            lambda key, layer, predicted_experts: None,
            experts_s=lambda: self._spent_s,
            clock=lambda: predictor.now_s,
        )

    def passes(self, count: int, *, decodes: bool = True) -> int:
        """In how many of them it guessed."""
        before = self._predictor.calls
        for _ in range(count):
            calls = self._predictor.calls
            key = TaskKey(0, 0, 0, Priority.LS, decodes)
            self._ahead.prepare(key, torch.zeros(1, dtype=torch.int64))
            has_guessed = self._predictor.calls > calls
            self._spent_s += self._waits_s - (self._hidden_s if has_guessed else 0.0)
        return self._predictor.calls - before


def test_guesses_that_save_more_than_they_cost_are_made() -> None:
    worker = Worker(Guessing(0.1), hidden_s=0.3)
    worker.passes(100)
    assert worker.passes(1000) > 900


def test_guesses_that_cost_more_than_they_save_are_tried_only() -> None:
    worker = Worker(Guessing(0.3), hidden_s=0.1)
    worker.passes(100)
    assert worker.passes(1000) < 100


def test_prompts_do_not_count_in_prefetch_trial() -> None:
    worker = Worker(Guessing(0.3), hidden_s=0.1)
    assert worker.passes(1000, decodes=False) == 1000


def test_speculated_layers_are_always_predicted() -> None:
    worker = Worker(Guessing(0.3, speculates=True), hidden_s=0.0)
    assert worker.passes(1000) == 1000
