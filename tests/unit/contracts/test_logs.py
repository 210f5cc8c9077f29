"""Log format, files and run folders."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from cluster.http.request_context import WRITTEN_AFTER_S, WRITTEN_LINES, AccessLog
from cluster.serving.log_folder import LOCK, keep_ray_logs, log_folder
from contracts.config import LogConfig
from contracts.errors import ConfigError
from contracts.loading import load_config
from contracts.logs import ACCESS, event, log_lines, set_up_logging

log = logging.getLogger("tandem.test")


@pytest.fixture(autouse=True)
def _afterwards() -> Iterator[None]:
    top = logging.getLogger("tandem")
    level, handlers = top.level, list(top.handlers)
    yield
    for handler in [one for one in top.handlers if one not in handlers]:
        top.removeHandler(handler)
        handler.close()
    top.setLevel(level)


def in_file(path: Path | None) -> list[str]:
    assert path is not None
    return path.read_text().splitlines()


def test_event_is_one_parsable_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = set_up_logging("expert-1", LogConfig(folder=str(tmp_path)))
    event(log, "rank_lost", logging.WARNING, rank="expert-1", reason='a "b"\nc', after_s=1 / 3)
    (line,) = in_file(file)
    head, fields = line.split(" rank_lost ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING tandem\.test", head)
    assert fields == r"""rank=expert-1 reason="a \"b\"\nc" after_s=0.333333"""
    assert file == tmp_path / "expert-1.log"
    assert capsys.readouterr().err == line + "\n", "stderr has it too"


def test_stderr_has_everything_or_with_a_file_warnings_without_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = set_up_logging("a", LogConfig(folder=str(tmp_path), level="debug"))
    event(log, "plan_chosen", ma=1)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("batch_failed")
    first, second = in_file(file)
    assert first.endswith("INFO tandem.test plan_chosen ma=1")
    head, trace = second.split(" trace=")
    assert "ValueError: no" in json.loads(trace)
    assert capsys.readouterr().err == head + "\n"
    assert set_up_logging("a", LogConfig()) is None
    event(log, "one")
    set_up_logging("a", LogConfig(level="warning"))
    event(log, "two")
    event(log, "three", logging.ERROR)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "three"], "once each"


def test_json_lines_have_the_same_fields(tmp_path: Path) -> None:
    path = set_up_logging("expert-1", LogConfig(folder=str(tmp_path), format="json"))
    event(log, "rank_lost", logging.WARNING, rank="expert-0", after_s=1 / 3, at="not ours")
    log_lines(logging.getLogger(ACCESS), [(0.0, "", {"path": "/é", "ms": 1.5}), (1.25, "b", {})])
    log.info("by %s", "hand\nand more")
    lost, request, b, by_hand = map(json.loads, in_file(path))
    assert re.fullmatch(r"\d{4}-.*Z", lost.pop("at")), "a field of ours is not overwritten"
    assert lost == {
        "level": "WARNING",
        "logger": "tandem.test",
        "process": "expert-1",
        "event": "rank_lost",
        "rank": "expert-0",
        "after_s": 1 / 3,
    }
    assert (request["at"], request["event"]) == ("1970-01-01T00:00:00.000Z", "request")
    assert (request["path"], request["ms"], b["event"]) == ("/é", 1.5, "b")
    assert b["at"] == "1970-01-01T00:00:01.250Z"
    assert by_hand["event"] == "by hand and more"


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("prompts", [False, True])
def test_private_error_message_requires_log_prompts(
    tmp_path: Path, form: Literal["text", "json"], prompts: bool
) -> None:
    config = LogConfig(folder=str(tmp_path), format=form, prompts=prompts)
    path = set_up_logging("a", config)
    try:
        raise KeyError("a secret prompt")
    except KeyError as error:
        event(log, "request_failed", logging.ERROR, error, is_private=True, request_id="r")
    (line,) = in_file(path)
    assert ("a secret prompt'" in line) == prompts
    assert "KeyError" in line
    assert "test_logs.py" in line, "the place is always logged"


@pytest.mark.parametrize("lines", [1, WRITTEN_LINES])
def test_access_log_is_flushed_by_time_and_by_size(tmp_path: Path, lines: int) -> None:
    path = set_up_logging("ingress", LogConfig(folder=str(tmp_path)))

    async def serve() -> list[str]:
        access_log = AccessLog()
        for number in range(lines):
            access_log.add({"path": f"/{number}"})
        at_once = in_file(path)
        await asyncio.sleep(2 * WRITTEN_AFTER_S)
        access_log.add({"path": "/last"})
        access_log.write()  # as at the end
        access_log.write()
        return at_once

    assert len(asyncio.run(serve())) == (lines if lines == WRITTEN_LINES else 0)
    paths = [line.rpartition("path=")[2] for line in in_file(path)]
    assert paths == [*(f"/{number}" for number in range(lines)), "/last"]


def test_log_file_rotates_at_its_size(tmp_path: Path) -> None:
    config = LogConfig(folder=str(tmp_path), max_file_bytes=1 << 16)
    path = set_up_logging("ingress", config)
    for number in range(1000):
        event(log, "happened", number=number, words="x" * 100)
    assert path is not None
    older = path.with_name("ingress.log.1").read_text().splitlines()
    newer = in_file(path)
    assert "number=999 " in newer[-1]
    numbers = [int(line.split("number=")[1].split()[0]) for line in older + newer]
    assert numbers == list(range(numbers[0], 1000))
    assert max(sum(map(len, part)) for part in (older, newer)) <= (1 << 16) + 200


def test_old_run_folders_are_removed_except_active_and_foreign_ones(tmp_path: Path) -> None:
    def run(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
        return tmp_path / name

    with log_folder(
        load_config(None, ["serve.name=a"]), {"XDG_STATE_HOME": str(tmp_path)}
    ) as config:
        folder = Path(config.log.folder or "")
        assert folder.parent == tmp_path / "tandem" / "a"
    assert folder.stat().st_mode & 0o777 == 0o700, "it stays after the run"
    (tmp_path := tmp_path / "runs").mkdir()
    config = load_config(None, [f"log.folder={tmp_path}", "log.runs=2"])
    (tmp_path / "notes").mkdir()
    (tmp_path / "a.log").touch()
    with log_folder(config, {}) as first:
        old = [run(f"2001010{day}-000000-1") for day in range(1, 5)]
        assert first.log.folder is not None
        running = Path(first.log.folder).rename(tmp_path / "20010100-000000-1")
        with log_folder(config, {}) as second:
            assert second.log.folder is not None
            left = {path.name for path in tmp_path.iterdir()}
    latest = Path(second.log.folder or "").name
    assert left == {"notes", "a.log", running.name, old[-1].name, latest}


def test_unwritable_log_folder_is_reported_and_replaced_by_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert set_up_logging("a", LogConfig(folder=str(tmp_path / "file"))) is None
    event(log, "one")
    failed, one = capsys.readouterr().err.splitlines()
    assert "log_file_failed" in failed
    assert one.endswith("one")
    config = load_config(None, [f"log.folder={tmp_path}/file/a"])
    with pytest.raises(ConfigError, match=r"log\.folder=.*cannot be written"):
        log_folder(config, {}).__enter__()


def test_last_output_of_ray_processes_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "session/logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_bytes(b"a" * (1 << 20) + b"the end")
    (logs / "raylet.out").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    keep_ray_logs(tmp_path / "session", folder)
    assert [path.name for path in (folder / "ray").iterdir()] == ["worker-1.err"]
    kept = (folder / "ray/worker-1.err").read_bytes()
    assert (len(kept), kept[-7:]) == (1 << 20, b"the end")


def test_user_without_writable_home_gets_no_log_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = load_config(None, [])
    with log_folder(config, {"XDG_STATE_HOME": str(tmp_path / "file")}) as found:
        assert found == config
