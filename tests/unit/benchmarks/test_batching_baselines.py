"""How others form batches."""

from benchmarks.support.batching_baselines import static_batching
from contracts.requests import Priority
from planner.scheduling.batching import ALL, BatchSelection
from tests.unit.planner.scheduling.test_batching import Classes, live


def test_static_batch_admits_no_sequence_before_it_ends() -> None:
    assert tuple(static_batching(Classes(1, 1))) == (ALL,)
    assert tuple(static_batching(Classes(1, 1, running=3))) == (BatchSelection(starts=0),)
    assert not tuple(static_batching(Classes(1, 1, (live(Priority.LS),), running=3)))
