"""Offered load of a worker."""

import pytest

from planner.scheduling.measured_rates import MEMORY_S, OfferedLoad


def test_load_is_the_rate_of_batches_and_of_their_seconds_and_fades() -> None:
    load = OfferedLoad()
    for number in range(400):
        load.add(0.1, number / 4)
    assert load.batches_per_s == pytest.approx(4.0, rel=0.05)
    assert load.busy_fraction == pytest.approx(0.4, rel=0.05)
    load.add(0.1, 100 + 10 * MEMORY_S)
    assert load.batches_per_s == pytest.approx(1 / MEMORY_S, rel=0.01)
