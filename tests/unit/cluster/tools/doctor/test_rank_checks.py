"""Checks of the limits of a rebalance."""

from __future__ import annotations

import pytest

from cluster.tools.doctor.config_checks import check_config
from cluster.tools.doctor.findings import Finding
from contracts import machine
from contracts.loading import load_config

MIB = 1 << 20
EXPERT_BYTES = 3 * 192 * 96 * 2  # of the bundled model, in bfloat16
RANK_BYTES = 5 * 8 * EXPERT_BYTES  # half of the experts of its five layers


@pytest.fixture(autouse=True)
def machine_of_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)


def moves(*settings: str) -> Finding:
    common = ["groups.expert_ranks=2", "placement.rebalance=continuous", "model.dtype=bfloat16"]
    common.append("placement.spare_slots=0")
    findings = check_config(load_config(None, [*common, *settings]), {})
    return next(each for each in findings if each.check == "moves")


def test_move_within_all_limits_is_ok_and_bounded_by_slots() -> None:
    finding = moves(f"placement.bytes_per_s={4 * RANK_BYTES}")
    assert (finding.level, finding.advice) == ("ok", "")
    assert f"at most {RANK_BYTES / MIB:.0f} MiB into a rank, in 0.25 s" in finding.found


@pytest.mark.parametrize(
    ("settings", "level", "advice"),
    [
        (["max_move_bytes=1000"], "error", f"give {EXPERT_BYTES} or more"),
        (
            ["bytes_per_s=100000", "move_timeout_s=30"],
            "warning",
            "set max_move_bytes to 3000000 or less",
        ),
    ],
)
def test_limits_that_do_not_fit_are_reported_with_remedy(
    settings: list[str], level: str, advice: str
) -> None:
    finding = moves(*(f"placement.{each}" for each in settings))
    assert finding.level == level
    assert advice in finding.advice


def test_moves_beyond_free_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * RANK_BYTES)
    assert moves().level == "ok"
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * RANK_BYTES - 1)
    finding = moves()
    assert finding.level == "warning"
    assert f"set max_move_bytes to {RANK_BYTES - 1} or less" in finding.advice


def test_fixed_or_cached_experts_have_no_limits() -> None:
    assert moves('placement.rebalance="off"') == Finding(
        "moves", "ok", "none: experts stay where they are"
    )
    bounded = moves("experts.slots=20")
    assert bounded.level == "ok"
    assert "read experts on demand" in bounded.found
