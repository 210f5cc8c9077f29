"""How others form batches."""

from __future__ import annotations

from contracts.requests import Priority
from planner.policies.baselines import run_to_completion
from planner.policies.batching import ALL, Form
from tests.unit.planner.policies.test_batching import Classes, live


def test_nobody_joins_before_all_of_the_batch_have_ended() -> None:
    assert tuple(run_to_completion(Classes(1, 1))) == (ALL,)
    assert tuple(run_to_completion(Classes(1, 1, running=3))) == (Form(starts=0),)
    assert not tuple(run_to_completion(Classes(1, 1, (live(Priority.LS),), running=3)))
