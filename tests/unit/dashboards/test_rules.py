"""Alerts fire on their condition, resolve after it, and have a runbook section.

The tests use Prometheus's own checker and are skipped without it.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from contracts import metrics
from contracts.metrics import MetricKind
from dashboards.rules import alerts, alerts_file, anchor, recording_file, recording_rules
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
    "TandemServerDown": Case({'up{job="tandem", instance="i"}': "1 0+0x9 1+0x20"}, 8, 12),
    "TandemRankDown": Case({f"tandem_rank_up{{{_RANK}}}": "1 0+0x10 1+0x20"}, 5, 15),
    "TandemEpochFlaps": Case(
        {'tandem_rank_restarts_total{group="prefill"}': "0 1 2 3 3+0x40"}, 5, 25
    ),
    "TandemScrapeMissing": Case(
        {
            'up{job="tandem", instance="i"}': "1 0+0x20 1+0x20",
            'up{job="tandem", instance="j"}': "1+0x40",
        },
        18,
        24,
    ),
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
            'tandem_load_flops{rank="prefill-1"}': "200+0x60",
            'tandem_saturation_flops{rank="prefill-0"}': "100+0x60",
            'tandem_saturation_flops{rank="prefill-1"}': "100+0x60",
            f'tandem_requests_waiting{{pipeline="prefill", {_BE}}}': "50+0x60",
        },
        10,
        25,
    ),
    "TandemPredictionsOff": Case(
        {
            'tandem_plan_batches_total{rank="attention-0"}': "0+20x80",
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
    for rule in alerts_file(docs_url="https://wiki/tandem/")["groups"][0]["rules"]:
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://wiki/tandem/runbooks/"
        assert heading in map(anchor, sections)


def test_alerts_carry_their_instructions_and_no_address_that_leads_nowhere() -> None:
    for rule in alerts_file()["groups"][0]["rules"]:
        annotations = rule["annotations"]
        assert set(annotations) == {"summary", "description"}
        assert annotations["description"].startswith("1. ")
        assert "](" not in annotations["description"]
        assert "{{" not in annotations["description"]


def test_rules_use_declared_metrics_and_recorded_series() -> None:
    known = set(recording_rules()) | {"up", "ALERTS"}
    for metric in metrics.ALL:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        known |= {metric.name + suffix for suffix in suffixes}
    expressions = [*recording_rules().values(), *(alert.expression for alert in ALERTS)]
    for expression in expressions:
        used = set(re.findall(r"(?:\w+:)?tandem_\w+(?::\w+)?", expression))
        assert used <= known, used - known


@needs_promtool
def test_promtool_accepts_committed_files() -> None:
    rules = ROOT / "dashboards" / "rules"
    _promtool("check", "rules", rules / "recording.yml", rules / "alerts.yml")
    assert "2 rule files" in _promtool("check", "config", ROOT / "dashboards" / "prometheus.yml")


@needs_promtool
def test_every_alert_fires_on_its_condition_and_resolves_after(tmp_path: Path) -> None:
    first = Case(server(Phase(2), Phase(8, failing=1.0)), 6, 1)
    cases = [*CASES.items(), ("TandemAnswersBurnsFast", first)]
    tests = [
        _promtool_test(
            case.series,
            f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
            {case.fires: [{"labels": "{}", "value": 1}], case.resolved: []},
        )
        for name, case in cases
    ]
    _test_rules(tmp_path, tests)


class Phase(NamedTuple):
    """Minutes of a server's life. per_minute: requests. error: of predicted batch times.

    up: 0 while its metrics cannot be scraped, None once its targets are removed.
    """

    minutes: int
    per_minute: float = 60.0
    failing: float = 0.0
    up: int | None = 1
    error: float = 0.1
    blocks: int = 800
    ranks: int = 2


def server(*phases: Phase) -> dict[str, str]:
    """Return all series that alerts use, in promtool notation, one sample per minute."""
    found: dict[str, list[str]] = defaultdict(list)
    totals: dict[str, float] = defaultdict(float)

    def add(name: str, phase: Phase, value: float | None, step: float = 0.0) -> None:
        last = phase.minutes - 1
        if value is None:
            found[name].append("stale" if not last else f"stale _x{last}")
            return
        found[name].append(f"{value + totals[name]:g}+{step:g}x{last}")
        totals[name] += step * phase.minutes

    for phase in phases:
        is_up = phase.up == 1
        if not is_up:
            totals.clear()
        ok = phase.per_minute * (1 - phase.failing) if is_up else 0.0
        steps = {
            _REQUESTS % "ok": ok,
            _REQUESTS % "error": phase.per_minute * phase.failing,
            f"tandem_time_to_first_token_seconds_count{{{_LS}}}": ok,
            f'tandem_time_to_first_token_seconds_bucket{{{_LS}, le="1.0"}}': ok,
            f"tandem_time_per_output_token_seconds_count{{{_LS}}}": ok,
            f'tandem_time_per_output_token_seconds_bucket{{{_LS}, le="0.25"}}': ok,
            'tandem_plan_batches_total{rank="attention-0"}': ok,
            'tandem_rank_restarts_total{group="prefill"}': 0.0,
        }
        gauges = {
            "tandem_plan_predicted_seconds": 0.1 * (1 + phase.error),
            "tandem_plan_measured_seconds": 0.1,
            'tandem_kv_blocks{rank="attention-0", state="used"}': 3.0 if ok else 0.0,
            'tandem_kv_blocks{rank="attention-0", state="free"}': phase.blocks,
            f'tandem_requests_waiting{{pipeline="prefill", {_BE}}}': min(ok / 10, 40.0),
            'tandem_objective_seconds{objective="be_wait"}': 300.0,
        }
        for name, step in steps.items():
            add(name, phase, 0.0 if is_up else None, step)
        for name, value in gauges.items():
            add(name, phase, value if is_up else None)
        add('up{job="tandem", instance="i", cluster="tandem"}', phase, phase.up)
        for rank in range(2):
            labels = f'{{group="prefill", rank="prefill-{rank}"}}'
            is_present = is_up and rank < phase.ranks
            for name, value in (
                ("rank_up", 1.0),
                ("rank_busy_fraction", min(ok / 600, 1.0)),
                ("load_flops", min(ok / 600, 2.0)),
                ("saturation_flops", 1.0),
            ):
                add(f"tandem_{name}{labels}", phase, value if is_present else None)
    return {name: " ".join(values) for name, values in found.items()}


_ONE_LATE = {
    f'tandem_time_to_first_token_seconds_bucket{{{_BE}, le="{le}"}}': "0+0x20 " + values
    for le, values in (("60", "0+0x90"), ("120", "1+0x90"), ("300", "1+0x90"), ("+Inf", "1+0x90"))
}


def deployed(number: int) -> dict[str, str]:
    """Return the series of one of several deployments, each for 25 minutes, 5 beside the next."""
    series = server(Phase(20 * number + 1, up=None), Phase(25), Phase(60, up=None))
    return {name.replace("{", f'{{pod="{number}", ', 1): v for name, v in series.items()}


ORDINARY = {
    "idle after an hour of traffic": server(Phase(60), Phase(120, 0.0, error=0.8)),
    "restart with a larger pool": server(Phase(30), Phase(2, up=None), Phase(60, blocks=900)),
    "crash, and back in three minutes": server(Phase(30), Phase(3, up=0), Phase(60)),
    "a model that loads for ten minutes": server(Phase(10, up=0), Phase(60)),
    "scale-down at night": server(Phase(60), Phase(60, 2.0, ranks=1)),
    "workers that come and go": server(*(Phase(3, ranks=1 + n % 2) for n in range(30)))
    | {'tandem_group_epoch{group="prefill"}': "1+1x90"},
    "little traffic, poorly predicted": server(Phase(180, 0.1, error=2.0)),
    "one failure of a quiet server": server(Phase(60, 0.2), Phase(5, 0.2, 1.0), Phase(120, 0.2)),
    "first request fails": server(Phase(1), Phase(1, 1.0, 1.0), Phase(120, 1.0)),
    "much traffic with rare failures": server(Phase(180, 6000.0, 0.0005)),
    "one best-effort request of a minute": server(Phase(110)) | _ONE_LATE,
    "many callers with short prompts": server(Phase(120, 240.0)),
    "a failed scrape": server(Phase(30), Phase(1, up=0), Phase(60)),
    "rolling deployments": {name: v for n in range(6) for name, v in deployed(n).items()},
    "clock goes forward, then back": {
        name: re.sub(r" (\S+) \S+ ", r" _x40 \1 _x40 ", values)
        for name, values in server(*4 * [Phase(40)]).items()
    },
}


@needs_promtool
def test_no_alert_fires_in_ordinary_situations(tmp_path: Path) -> None:
    any_firing = 'max_over_time(count(ALERTS{alertstate="firing"})[4h:1m])'
    tests = [
        _promtool_test(series, any_firing, {200: []}, name) for name, series in ORDINARY.items()
    ]
    stopped = server(Phase(60, failing=0.5), Phase(120, up=None))
    firing = 'count(ALERTS{alertstate="firing"})'
    after: dict[int, list[Any]] = {minute: [] for minute in (61, 65, 90)}
    _test_rules(tmp_path, [*tests, _promtool_test(stopped, firing, after, "stop while it burns")])


def _test_rules(folder: Path, tests: list[dict[str, Any]]) -> None:
    for name, rules in (("recording.yml", recording_file()), ("alerts.yml", alerts_file())):
        (folder / name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    document = {
        "rule_files": ["recording.yml", "alerts.yml"],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    (folder / "tests.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    _promtool("test", "rules", folder / "tests.yml")


def _promtool_test(
    series: dict[str, str], expression: str, at: dict[int, list[Any]], name: str = ""
) -> dict[str, Any]:
    """at: minute → expected samples."""
    return {
        "interval": "1m",
        "name": name,
        "input_series": [{"series": s, "values": values} for s, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": expected}
            for minute, expected in at.items()
        ],
    }


def _promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
