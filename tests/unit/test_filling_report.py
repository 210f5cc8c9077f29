"""The filling part's report: the choice against the better policy, and a policy against itself."""

from __future__ import annotations

import pytest

from benchmarks.filling_report import print_filling, simulated, summarise_filling
from benchmarks.filling_runs import POINTS


def test_the_choice_is_held_against_the_policy_that_is_better_in_its_median_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = {
        "never": [[0.2, 0.4], [0.1, 0.1], [0.2, 0.2]],
        "always": [[0.1, 0.1], [0.5, 0.9], [0.6, 0.6]],
        "choose": [[0.3, 0.6], [0.1, 0.1], [9.0, 9.0]],
        "again": [[0.2, 0.4], [0.2, 0.2], [0.1, 0.1]],
    }
    found = summarise_filling({str(point): blocks for point in POINTS})
    for row in found.values():
        assert row["block_medians_s"]["never"] == pytest.approx(0.2)
        assert row["means_s"]["never"] == pytest.approx(0.2)
        assert row["chosen_quartiles"] == pytest.approx([1.25, 1.5, 23.25])
        assert row["again_quartiles"] == pytest.approx([0.75, 1.0, 1.5])
    print_filling(found)
    assert "1.500 (1.25 to 23.25)" in capsys.readouterr().out


def test_the_simulation_is_of_the_same_requests_and_its_passes_vary_only_where_it_says_so() -> None:
    found = simulated(3.0, 1, 32)
    assert found == simulated(3.0, 1, 32)
    assert found["exact"]["again_p10"] == found["exact"]["again_p90"] == 1.0
    assert found["varied"]["again_p10"] < 1.0 < found["varied"]["again_p90"]
