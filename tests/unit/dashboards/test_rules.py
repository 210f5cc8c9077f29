"""Alerts fire on their condition, resolve after it, and have a runbook section.

The tests use Prometheus's own checker and are skipped without it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from contracts import metrics
from contracts.metrics import MetricKind
from dashboards.rules import TimeScale, alerts, alerts_file, anchor, recording_file, recording_rules
from tests.architecture.support import ROOT

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
ALERTS = alerts()
DEADLINE_S = 60.0
_LS, _BE = 'class="ls"', 'class="be"'
_REQUESTS = 'tandem_requests_total{pipeline="generation", class="ls", outcome="%s"}'


class Case(NamedTuple):
    """series: one sample per minute, in promtool notation. fires, resolved: in minutes."""

    series: dict[str, str]
    fires: int
    resolved: int


def _late(metric: str, bound: str) -> dict[str, str]:
    """Return series in which every request is late for 90 minutes, then none."""
    return {
        f'{metric}_bucket{{{_LS}, le="{bound}"}}': "0+0x90 60+60x60",
        f"{metric}_count{{{_LS}}}": "0+60x150",
    }


_ERRORS = {_REQUESTS % "ok": "0+60x150", _REQUESTS % "error": "0+60x90 5400+0x60"}
_RANK = 'group="expert", rank="expert-0"'
CASES = {
    "TandemTtftBurnsFast": Case(_late("tandem_time_to_first_token_seconds", "1.0"), 60, 100),
    "TandemTtftBurnsSlow": Case(_late("tandem_time_to_first_token_seconds", "1.0"), 60, 135),
    "TandemTbtBurnsFast": Case(_late("tandem_time_per_output_token_seconds", "0.25"), 60, 100),
    "TandemTbtBurnsSlow": Case(_late("tandem_time_per_output_token_seconds", "0.25"), 60, 135),
    "TandemAnswersBurnsFast": Case(_ERRORS, 60, 100),
    "TandemAnswersBurnsSlow": Case(_ERRORS, 60, 135),
    "TandemRankDown": Case({f"tandem_rank_busy_fraction{{{_RANK}}}": "0.5+0x20 stale"}, 22, 35),
    "TandemEpochFlaps": Case({'tandem_group_epoch{group="prefill"}': "1 2 3 4 4+0x40"}, 5, 25),
    "TandemScrapeMissing": Case({'up{job="tandem", instance="i"}': "1 0+0x5 1+0x20"}, 4, 10),
    "TandemBlocksLeak": Case(
        {
            'tandem_kv_blocks{rank="attention-0", state="used"}': "3+0x40 0+0x40",
            'tandem_kv_blocks{rank="attention-0", state="free"}': "5+0x40 8+0x40",
            'tandem_rank_busy_fraction{group="attention", rank="attention-0"}': "0+0x80",
        },
        20,
        45,
    ),
    "TandemSaturationLost": Case(
        {
            'tandem_load_flops{rank="prefill-0"}': "10+0x20 200+0x40",
            'tandem_saturation_flops{rank="prefill-0"}': "100+0x60",
            f'tandem_requests_waiting{{pipeline="prefill", {_BE}}}': "50+0x60",
        },
        10,
        25,
    ),
    "TandemPredictionsOff": Case(
        {
            "tandem_plan_predicted_seconds": "3+0x80",
            "tandem_plan_measured_seconds": "1+0x40 3+0x40",
        },
        20,
        50,
    ),
    "TandemBestEffortNearBound": Case(
        {
            f'tandem_time_to_first_token_seconds_bucket{{{_BE}, le="60.0"}}': "0+0x40 60+60x40",
            f'tandem_time_to_first_token_seconds_bucket{{{_BE}, le="300.0"}}': "0+60x80",
            f'tandem_time_to_first_token_seconds_bucket{{{_BE}, le="+Inf"}}': "0+60x80",
            'tandem_objective_seconds{objective="be_wait"}': "300+0x80",
        },
        20,
        50,
    ),
}


def test_every_alert_has_a_case_and_a_runbook_section() -> None:
    assert sorted(CASES) == sorted(alert.name for alert in ALERTS)
    text = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", text, re.MULTILINE))
    for alert in ALERTS:
        assert "1. " in sections[alert.section], f"{alert.name}: no instructions"
        shortened = re.sub("Burns(Fast|Slow)", "BurnsFast", alert.name)
        assert f"`{shortened}`" in sections[alert.section], alert.name
    assert {alert.section for alert in ALERTS} == set(sections)
    for rule in alerts_file()["groups"][0]["rules"]:
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).exists()
        assert heading in map(anchor, sections)


def test_rules_use_declared_metrics_and_recorded_series() -> None:
    known = set(recording_rules()) | {"up", "ALERTS"}
    for metric in metrics.ALL:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        known |= {metric.name + suffix for suffix in suffixes}
    expressions = [*recording_rules().values(), *(alert.expression for alert in ALERTS)]
    for expression in expressions:
        used = set(re.findall(r"(?:\w+:)?tandem_\w+(?::\w+)?", expression))
        assert used <= known, used - known


def test_faster_pace_shortens_windows_and_keeps_names() -> None:
    quick = TimeScale(faster=60.0, interval_s=0.5)
    assert [alert.name for alert in alerts(quick)] == [alert.name for alert in ALERTS]
    assert list(recording_rules(quick)) == list(recording_rules())
    assert quick.of(3600.0) == "1m"
    assert quick.of(60.0) == "1s"
    assert quick.of(0.0) == "0ms"
    assert TimeScale(faster=1e6, interval_s=1.0).of(60.0) == "2s"
    assert TimeScale().of(21_600.0) == "6h"


@needs_promtool
def test_promtool_accepts_committed_files() -> None:
    rules = ROOT / "dashboards" / "rules"
    _promtool("check", "rules", rules / "recording.yml", rules / "alerts.yml")
    assert "2 rule files" in _promtool("check", "config", ROOT / "dashboards" / "prometheus.yml")


@needs_promtool
def test_every_alert_fires_on_its_condition_and_resolves_after(tmp_path: Path) -> None:
    unavailable = Case({f"tandem_rank_up{{{_RANK}}}": "1 0+0x10 1+0x20"}, 5, 15)
    cases = [*CASES.items(), ("TandemRankDown", unavailable)]
    for name, rules in (("recording.yml", recording_file()), ("alerts.yml", alerts_file())):
        (tmp_path / name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    tests = {
        "rule_files": ["recording.yml", "alerts.yml"],
        "evaluation_interval": "1m",
        "tests": [_promtool_test(*case) for case in cases],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests), encoding="utf-8")
    _promtool("test", "rules", tmp_path / "tests.yml")


def _promtool_test(name: str, case: Case) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    return {
        "interval": "1m",
        "input_series": [{"series": s, "values": values} for s, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": f"{case.fires}m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
            {"expr": firing, "eval_time": f"{case.resolved}m", "exp_samples": []},
        ],
    }


def _promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
