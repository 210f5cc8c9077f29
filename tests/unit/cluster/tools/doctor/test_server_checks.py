"""`tandem doctor --url`: each finding by its cause, and servers that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import main
from cluster.http.admin import version
from cluster.http.request_context import TraceSource
from cluster.http.response_types import PipelineLoad, Status
from cluster.tools.doctor import server_checks
from cluster.tools.doctor.findings import Finding
from cluster.tools.doctor.server_checks import MetricSamples, ServerSnapshot, findings_of
from contracts.ranks import RankStatus
from contracts.traces import ClockOffset, RankTraceInfo, TraceInfo, TraceResponse
from tests.support.api_harness import serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level

Capture = pytest.CaptureFixture[str]
SHARED = ClockOffset(offset_ms=0.0, uncertainty_ms=0.3, is_shared=True)


def rank(name: str, uptime_s: float = 60.0, **changes: Any) -> RankStatus:
    sections = {
        "stage_s": {"attention": 10.0},
        "kv_blocks": {"free": 90.0, "cached": 10.0, "used": 0.0},
    }
    fields: dict[str, Any] = {"name": name, "healthy": True, "epoch": 1, "uptime_s": uptime_s}
    return RankStatus(**(fields | {"sections": sections} | changes))


def status(*ranks: RankStatus, waiting: int = 0, **changes: Any) -> Status:
    load = PipelineLoad(requests=0, waiting={"ls": waiting, "be": 0})
    fields: dict[str, Any] = {"model": "tiny", "version": version(), "problems": []}
    fields |= {"pipelines": {"generation": load}, "ranks": list(ranks)}
    return Status(**(fields | changes))


def seen(before: Status, now: Status, **changes: Any) -> ServerSnapshot:
    scraped: MetricSamples = {
        ("tandem_rank_busy_fraction", (("rank", one.name),)): 0 for one in now.ranks
    }
    clocks = TraceInfo(seconds=0.0, ranks={"ingress": RankTraceInfo(clock=SHARED, spans=0)})
    found = ServerSnapshot(before, now, 2.0, scraped, clocks)
    more = changes.pop("more", {})
    return found._replace(**changes)._replace(
        scraped=None if "scraped" in changes else scraped | more
    )


def well(**changes: Any) -> ServerSnapshot:
    before = status(rank("attention-0"), rank("expert-0"))
    now = status(rank("attention-0", 62.0), rank("expert-0", 62.0))
    return seen(before, now, **changes)


def of(check: str, found: ServerSnapshot) -> Finding:
    (finding,) = (one for one in findings_of(found) if one.check == check)
    return finding


def level_of(check: str, found: ServerSnapshot) -> str:
    finding = of(check, found)
    assert (finding.level == "ok") == (finding.advice == ""), finding
    return finding.level


def test_where_all_is_well_no_line_wants_anything() -> None:
    assert {one.level for one in findings_of(well())} == {"ok"}
    assert len(findings_of(well())) == 10


def changed(**changes: Any) -> ServerSnapshot:
    """As `well`, but for what attention-0 says now."""
    before = status(rank("attention-0"), rank("expert-0"))
    now = rank("attention-0", **({"uptime_s": 62.0} | changes))
    return seen(before, status(now, rank("expert-0", 62.0)))


def blocks(**counts: float) -> dict[str, dict[str, float]]:
    return {"kv_blocks": {"free": 0.0, "cached": 0.0, "used": 0.0} | counts}


def test_a_lost_rank_and_one_of_another_epoch_are_errors() -> None:
    lost = changed(healthy=False, reason="no heartbeat")
    assert level_of("ranks", lost) == "error"
    assert "attention-0: no heartbeat" in of("ranks", lost).found
    assert level_of("ranks", changed(uptime_s=1.0)) == "warning", "it has begun anew"
    assert level_of("epochs", changed(epoch=2)) == "error"
    replaced = status(rank("prefill-0"), rank("prefill-1", epoch=2))
    assert level_of("epochs", seen(replaced, replaced)) == "ok", "as workers are replaced"


def test_blocks_that_an_idle_rank_holds_are_an_error_and_those_of_a_busy_one_are_not() -> None:
    held = rank("attention-0", sections=blocks(free=97.0, used=3.0))
    later = rank("attention-0", 62.0, sections=blocks(free=97.0, used=3.0))
    assert level_of("KV pools", seen(status(held), status(later))) == "error"
    busy = rank("attention-0", 62.0, running=1, sections=blocks(free=97.0, used=3.0))
    assert level_of("KV pools", seen(status(held), status(busy))) == "ok"
    fewer = rank("attention-0", 62.0, running=1, sections=blocks(free=96.0, used=3.0))
    assert level_of("KV pools", seen(status(held), status(fewer))) == "error"


def test_saturated_rank_is_a_warning_while_requests_wait() -> None:
    before = status(rank("attention-0"))
    at_work = rank("attention-0", 62.0, sections={"stage_s": {"attention": 12.0}})
    assert level_of("load", seen(before, status(at_work))) == "ok"
    waited_for = seen(before, status(at_work, waiting=4))
    assert level_of("load", waited_for) == "warning"
    assert "attention-0 100%" in of("load", waited_for).found


def test_a_planner_that_is_away_or_wrong_is_a_warning() -> None:
    assert level_of("planner", changed(notes={"planner": "lost"})) == "warning"
    for predicted_s, level in ((0.011, "ok"), (0.02, "warning"), (0.004, "warning")):
        more = {("tandem_plan_predicted_seconds", ()): predicted_s}
        more[("tandem_plan_measured_seconds", ())] = 0.01
        assert level_of("planner", well(more=more)) == level


def test_clocks_that_are_known_badly_and_ranks_without_one_are_warnings() -> None:
    far = ClockOffset(offset_ms=9e6, uncertainty_ms=0.4, is_shared=False)
    badly = ClockOffset(offset_ms=0.1, uncertainty_ms=9.0, is_shared=False)
    for clock, level in ((far, "ok"), (badly, "warning")):
        note = TraceInfo(seconds=0.0, ranks={"expert-0": RankTraceInfo(clock=clock, spans=0)})
        assert level_of("clocks", well(clocks=note)) == level
    missing = TraceInfo(seconds=0.0, missing={"expert-0": "no answer"})
    assert level_of("clocks", well(clocks=missing)) == "warning"
    assert level_of("clocks", well(clocks=None, no_clocks="429")) == "warning"


def test_missing_series_and_refused_keys_are_reported() -> None:
    assert level_of("metrics", well(scraped=None, not_scraped="/metrics answered 500")) == "error"
    silent = status(rank("attention-0", 62.0), rank("expert-9", 62.0))
    found = well()
    assert level_of("metrics", found._replace(status=silent)) == "warning"
    refused = {("tandem_api_key_reloads_total", (("outcome", "refused"),)): 1.0}
    assert level_of("keys", well(more=refused)) == "warning"


def test_other_version_and_unready_server_are_reported() -> None:
    now = status(rank("attention-0"), version="0.0.9", problems=["attention-0 is lost"])
    found = seen(now, now)
    assert level_of("version", found) == "warning"
    assert level_of("reached", found) == "error"


async def _no_offset() -> ClockOffset:
    return SHARED


async def _no_spans(seconds: float) -> TraceResponse:
    assert seconds == 0
    return TraceResponse(note=TraceInfo(seconds=0.0))


def test_a_live_server_is_examined_with_its_keys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(server_checks, "SAMPLE_INTERVAL_S", 0.0)
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys: [sk-secret]")
    keys.chmod(0o644)

    async def fetch_status() -> list[RankStatus]:
        return [rank("attention-0")]

    fake, tracing = FakeRank("attention-0", lambda submit: [60]), TraceSource(_no_spans, _no_offset)
    with serve_api(
        write_byte_level(tmp_path), [fake], fetch_status=fetch_status, tracing=tracing
    ) as api:
        settings = [f"http.keys_file={keys}", f"metrics.targets={tmp_path}"]
        arguments = ["doctor", "--url", api.url, "--set", settings[0], "--set", settings[1]]
        assert main([*arguments, "--json"]) == 0
        found = {one["check"]: one["level"] for one in json.loads(capsys.readouterr().out)[:-1]}
        assert main(arguments) == 0
    out = capsys.readouterr().out
    assert found == dict.fromkeys(found, "ok") | {"metrics": "warning"}
    assert "mode 0644" in out
    assert "sk-secret" not in out


def test_unreachable_server_is_one_finding_and_exit_status_2(capsys: Capture) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["check"], finding["level"]) == ("reached", "error")
