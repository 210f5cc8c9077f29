"""What the benchmark of priorities reads from two scrapes."""

from __future__ import annotations

import pytest

from benchmarks.priorities.group import blocking


def test_blocking_is_read_from_what_happened_between_two_scrapes() -> None:
    def scrape(*counts: int, seconds: float) -> str:
        name = "tandem_preemption_blocking_seconds"
        ends = ("0.001", "0.01", "+Inf")
        lines = [
            f'{name}_bucket{{le="{end}",rank="a"}} {count}.0'
            for end, count in zip(ends, counts, strict=True)
        ]
        return "\n".join([*lines, f"{name}_sum {seconds}", f"{name}_count {counts[-1]}.0"])

    found = blocking(scrape(1, 1, 2, seconds=5.0), scrape(4, 5, 6, seconds=5.02))
    assert found == {"waits": 4, "mean_ms": pytest.approx(5), "longest_below_ms": 10}
