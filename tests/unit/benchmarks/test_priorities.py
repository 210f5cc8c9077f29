"""Rates that the benchmarks of two priority classes report."""

from __future__ import annotations

import pytest

from benchmarks.load.on_rank import per_second_of


def test_tokens_per_second_are_from_one_end_of_a_batch_to_another() -> None:
    batches = [(10.0, 40), (12.0, 100), (14.0, 100), (16.0, 100)]
    done = [(at_s + 0.001 * row, tokens // 4) for at_s, tokens in batches for row in range(4)]
    assert per_second_of(done) == pytest.approx(50.0, rel=0.001), "not 340 tokens in 16 s"
    assert per_second_of(done[:4]) == per_second_of([]) == 0.0, "of one batch nothing is known"
