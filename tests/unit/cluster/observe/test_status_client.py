"""`GET /status` and `tandem status` with servers that answer, fail, or do not answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import main
from cluster.http import admin
from cluster.observe import status_client as client
from cluster.observe.server_client import Server
from cluster.observe.status_client import fetch_status, watch
from contracts.config import HttpConfig
from contracts.errors import ConfigError, NotReadyError
from contracts.ranks import RankStatus
from tests.support.api_harness import MODEL, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import write_byte_level

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


def _rank(busy_s: float, uptime_s: float, **changes: Any) -> RankStatus:
    sections = {
        "stage_s": {"attention": busy_s, "wait": 5.0, "held": 3.0, "a2e": 9.0},
        "totals": {"exposed_s": busy_s / 2},
        "kv_blocks": {"free": 1000.0, "used": 200.0, "cached": 34.0},
        "plans": {"asas ma=4": 7.0, "naive": 2.0},
    }
    fields: dict[str, Any] = {"name": "attention-0", "healthy": True, "uptime_s": uptime_s}
    return RankStatus(**(fields | {"sections": sections} | changes))


def _answers(*ranks: RankStatus) -> Callable[[], Any]:
    async def fetch_status() -> list[RankStatus]:
        return list(ranks)

    return fetch_status


def _quiet_rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60])


def test_table_shows_state_of_each_rank(folder: Path, capsys: Capture) -> None:
    ranks = [_rank(30.0, 60.0, running=3, waiting=2), _rank(0.0, 3720.0, name="expert-0")]
    with serve_api(folder, [_quiet_rank()], fetch_status=_answers(*ranks)) as api:
        assert main(["status", "--url", api.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{MODEL} on {api.url}")
    assert lines[0].endswith(": ready")
    attention, expert = (line.split() for line in lines[4:6])
    assert attention[:8] == ["attention-0", "0", "1", "min", "3", "2", "50%", "25%"]
    assert attention[8:] == ["234", "of", "1,234"]
    assert "attention-0 plans: asas ma=4, 7 of 9 batches" in lines
    assert expert[:8] == ["expert-0", "0", "1", "h", "02", "min", "0", "0"]


def test_lost_rank_is_reported_with_its_reason(folder: Path, capsys: Capture) -> None:
    lost = RankStatus(name="expert-0", healthy=False, reason="no answer for 3.1 s")
    with serve_api(folder, [_quiet_rank()], fetch_status=_answers(lost)) as api:
        assert main(["status", "--url", api.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"][0]["reason"] == "no answer for 3.1 s"
        assert main(["status", "--url", api.url]) == 0
    assert "expert-0 is lost: no answer for 3.1 s\n" in capsys.readouterr().out


def test_unreachable_ranks_are_a_problem_and_the_rest_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(admin, "SCRAPE_TIMEOUT_S", 0.05)

    async def never() -> list[RankStatus]:
        await asyncio.Event().wait()
        return []

    async def gone() -> list[RankStatus]:
        raise NotReadyError("the launcher of the ranks does not answer")

    for fetch, message in (
        (never, "have not reported their state within"),
        (gone, "does not answer"),
    ):
        with serve_api(folder, [_quiet_rank()], fetch_status=fetch) as api:
            assert main(["status", "--url", api.url]) == 2
        out = capsys.readouterr().out
        assert "not ready" in out
        assert message in out


def test_watch_shows_changes_and_survives_server_outage(folder: Path, capsys: Capture) -> None:
    ranks = [_rank(30.0, 60.0)]
    rounds = 0

    class EnoughError(Exception):
        """Ends a watch."""

    def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        ranks[0] = _rank(30.0, 60.0 + rounds)
        if rounds == 3:
            raise EnoughError

    async def fetch_status() -> list[RankStatus]:
        if rounds == 2:
            raise NotReadyError("away for a while")
        return ranks

    with (
        serve_api(folder, [_quiet_rank()], fetch_status=fetch_status) as api,
        pytest.raises(EnoughError),
    ):
        watch(Server(api.url), 1.0, sleep)
    assert "away for a while" in capsys.readouterr().out


def test_its_key_is_the_one_of_metrics(folder: Path, capsys: Capture) -> None:
    http = HttpConfig(api_keys=["client"], metrics_key="watcher")
    with serve_api(folder, [_quiet_rank()], http, fetch_status=_answers()) as api:
        assert main(["status", "--url", api.url, "--api-key", "client"]) == 2
        assert "401: give the key of its http.metrics_key" in capsys.readouterr().err
        assert main(["status", "--url", api.url, "--api-key", "watcher"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost"], "begin it with http"),
        (["--watch", "0"], "--watch 0.0: give 0.1 or more"),
        (["--watch", "nan"], "--watch nan: give 0.1 or more"),
        (["--watch", "--json"], "give one of them"),
        ([], "no answer: "),
    ],
)
def test_status_error_is_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    url = [] if "--url" in arguments else ["--url", f"http://127.0.0.1:{port}"]
    assert main(["status", *url, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tandem status: ")
    assert message in err
    assert err.count("\n") == 1


def test_foreign_server_is_reported_and_endless_answer_is_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_api(folder, [_quiet_rank()], fetch_status=_answers(_rank(1.0, 2.0))) as api:
        with pytest.raises(ConfigError, match="answered 404, and not as Tandem does"):
            fetch_status(Server(f"{api.url}/nowhere"))
        monkeypatch.setattr(client, "_MAX_BYTES", 100)
        with pytest.raises(ConfigError, match="no end after"):
            fetch_status(Server(api.url))
