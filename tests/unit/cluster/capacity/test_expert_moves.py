"""What `tandem doctor` says of experts that move."""

from __future__ import annotations

import pytest

from cluster.capacity import expert_moves
from cluster.capacity.doctor import examine
from cluster.capacity.expert_moves import Moving, copy_bytes_per_s
from cluster.files.findings import Finding
from contracts import machine
from contracts.config import PlacementConfig
from contracts.loading import load_config

MIB = 1 << 20
MOVING = Moving(ranks=2, expert_bytes=MIB, rank_bytes=64 * MIB)


@pytest.fixture(autouse=True)
def machine_of_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(expert_moves, "copy_bytes_per_s", lambda: 1e9)


def said(**settings: object) -> tuple[str, str, str]:
    config = PlacementConfig(follow="follow", **settings)  # type: ignore[arg-type]
    return expert_moves.expert_moves(config, MOVING)


def found(*settings: str) -> Finding:
    findings = examine(load_config(None, ["groups.expert_ranks=2", *settings]), {})
    return next(each for each in findings if each.check == "moves")


def test_a_move_within_all_limits_is_fine() -> None:
    level, told, advice = said(move_bytes=32 * MIB, bytes_per_s=64.0 * MIB)
    assert (level, advice) == ("ok", "")
    assert "32 MiB into a rank" in told
    assert "in 0.5 s" in told
    assert "copies 1.0 GB/s, 7% of it" in told


def test_no_more_comes_in_than_a_rank_has_slots_for() -> None:
    assert "at most 64 MiB into a rank" in said(move_bytes=1 << 40, deadline_s=3600.0)[1]


@pytest.mark.parametrize(
    ("settings", "level", "advice"),
    [
        ({"move_bytes": MIB - 1}, "error", f"give {MIB} or more"),
        ({"bytes_per_s": 1e6, "deadline_s": 30.0}, "warning", "move_bytes at most 30000000"),
        ({"move_bytes": MIB, "bytes_per_s": 6e8}, "warning", "bytes_per_s at most 5e+08"),
    ],
)
def test_limits_that_do_not_fit_are_told_with_what_would(
    settings: dict[str, float], level: str, advice: str
) -> None:
    told = said(**settings)
    assert told[0] == level
    assert advice in told[2]


def test_moves_that_memory_has_no_room_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)
    assert said(move_bytes=50 * MIB)[0] == "ok"
    level, _, advice = said(move_bytes=51 * MIB)
    assert level == "warning"
    assert f"move_bytes at most {50 * MIB}" in advice


def test_where_experts_stay_nothing_is_measured() -> None:
    assert found() == Finding("moves", "ok", "none: experts stay where they are")
    bounded = found("placement.follow=follow", "experts.slots=20")
    assert bounded.level == "ok"
    assert "read experts as they are wanted" in bounded.found


def test_of_the_bundled_model_a_rank_takes_in_what_it_has_slots_for() -> None:
    finding = found("placement.follow=follow", "model.dtype=bfloat16")
    assert finding.level == "ok"
    assert "at most 4 MiB into a rank" in finding.found


def test_a_core_copies_at_some_rate() -> None:
    assert 0 < copy_bytes_per_s() < 1e13
