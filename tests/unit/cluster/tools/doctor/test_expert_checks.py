"""What `tandem doctor` says of experts that move."""

from __future__ import annotations

import pytest

from cluster.tools.doctor import expert_checks
from cluster.tools.doctor.config_checks import check_config
from cluster.tools.doctor.expert_checks import MoveDemand, copy_bytes_per_s
from cluster.tools.doctor.findings import Finding
from contracts import machine
from contracts.config import PlacementConfig
from contracts.loading import load_config

MIB = 1 << 20
MOVING = MoveDemand(ranks=2, expert_bytes=MIB, rank_bytes=64 * MIB)


@pytest.fixture(autouse=True)
def machine_of_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(expert_checks, "copy_bytes_per_s", lambda: 1e9)


def run_check(**settings: object) -> tuple[str, str, str]:
    config = PlacementConfig(rebalance="continuous", **settings)  # type: ignore[arg-type]
    return expert_checks.expert_moves(config, MOVING)


def found(*settings: str) -> Finding:
    findings = check_config(load_config(None, ["groups.expert_ranks=2", *settings]), {})
    return next(each for each in findings if each.check == "moves")


def test_a_move_within_all_limits_is_fine() -> None:
    level, text, advice = run_check(max_move_bytes=32 * MIB, bytes_per_s=64.0 * MIB)
    assert (level, advice) == ("ok", "")
    assert "32 MiB into a rank" in text
    assert "in 0.5 s" in text
    assert "copies 1.0 GB/s, 7% of it" in text


def test_no_more_comes_in_than_a_rank_has_slots_for() -> None:
    assert (
        "at most 64 MiB into a rank" in run_check(max_move_bytes=1 << 40, move_timeout_s=3600.0)[1]
    )


@pytest.mark.parametrize(
    ("settings", "level", "advice"),
    [
        ({"max_move_bytes": MIB - 1}, "error", f"give {MIB} or more"),
        (
            {"bytes_per_s": 1e6, "move_timeout_s": 30.0},
            "warning",
            "set max_move_bytes to 30000000 or less",
        ),
        ({"max_move_bytes": MIB, "bytes_per_s": 6e8}, "warning", "bytes_per_s at most 5e+08"),
    ],
)
def test_limits_that_do_not_fit_are_reported_with_remedy(
    settings: dict[str, float], level: str, advice: str
) -> None:
    text = run_check(**settings)
    assert text[0] == level
    assert advice in text[2]


def test_moves_beyond_free_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)
    assert run_check(max_move_bytes=50 * MIB)[0] == "ok"
    level, _, advice = run_check(max_move_bytes=51 * MIB)
    assert level == "warning"
    assert f"move_bytes at most {50 * MIB}" in advice


def test_fixed_experts_need_no_measurement() -> None:
    assert found() == Finding("moves", "ok", "none: experts stay where they are")
    bounded = found("placement.rebalance=continuous", "experts.slots=20")
    assert bounded.level == "ok"
    assert "read experts as they are wanted" in bounded.found


def test_of_the_bundled_model_a_rank_takes_in_what_it_has_slots_for() -> None:
    finding = found("placement.rebalance=continuous", "model.dtype=bfloat16")
    assert finding.level == "ok"
    assert "at most 4 MiB into a rank" in finding.found


def test_a_core_copies_at_some_rate() -> None:
    assert 0 < copy_bytes_per_s() < 1e13
