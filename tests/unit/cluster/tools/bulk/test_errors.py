"""Errors of `tandem bulk`: one line, exit status 2, nothing started."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import ray

from cluster.cli.main import main
from cluster.observe.terminal import Terminal
from cluster.tools.bulk.job import check_job
from cluster.tools.bulk.run import WorkerSource, run_bulk
from contracts.config import TandemConfig
from contracts.errors import ConfigError, LaunchError
from tests.support.bulk_support import bulk_job
from tests.support.one_line_errors import error_line

STOPPED = "no cluster in this test"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the error line of a command; it contains STOPPED if a cluster would start."""

    def no_ray(*_: object, **__: object) -> None:
        raise LaunchError(STOPPED)

    monkeypatch.setattr(ray, "init", no_ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')

    def call(*flags: str, **options: str) -> str:
        given = {"input": "rows.jsonl", "output": "out", "labels": "no,yes", "model": "bundled"}
        given.update(options)
        words = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value]
        return error_line(capsys, "bulk", *words, *flags)

    return call


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "no,,yes"}, "labels[1] is empty"),
        ({"labels": "no,yes,no"}, "'no' occurs more than once"),
        ({"labels": ",".join(map(str, range(257)))}, "labels: 257 are more than 256"),
        ({"labels": "a\udcff,b"}, "valid Unicode"),
        ({"labels": 'a,"b'}, "as a line of CSV"),
        ({"template": "no place for it"}, "template: {text} does not occur"),
        ({"template": "{text}", "prefix_field": "p"}, "{prefix} does not occur in --template"),
        ({"input": "none.jsonl"}, "--input none.jsonl"),
        ({"input": "*.csv"}, "--input *.csv: no such file"),
        ({"input": "nowhere://bucket/rows.jsonl"}, "--input nowhere://bucket/rows.jsonl"),
        ({"limit": "0"}, "--limit=0: must be more than 0"),
        ({"window_rows": "-5"}, "--window-rows=-5: must be more than 0"),
        ({"model": ""}, "give --address"),
        ({"address": "auto"}, "give --address"),
        ({"model": "nowhere"}, "model.path=nowhere"),
        ({"set": "prefill.saturation=-1"}, "prefill.saturation"),
        ({"output": "rows.jsonl"}, "cannot be written"),
        ({"output": "."}, "not empty (rows.jsonl), and no bulk job's folder"),
    ],
)
def test_unusable_option_is_named(run: Run, options: dict[str, str], words: str) -> None:
    line = run(**options)
    assert words in line
    assert STOPPED not in line


def test_ctrl_c_prints_resume_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def workers() -> Iterator[WorkerSource]:
        yield WorkerSource(TandemConfig(), lambda: None)

    monkeypatch.setattr("cluster.tools.bulk.run._run", interrupted)
    job = msgspec.structs.replace(bulk_job(tmp_path / "out"), inputs=("rows.jsonl",))
    with pytest.raises(KeyboardInterrupt):
        run_bulk(job, workers(), Terminal(stderr=True))
    error_output = capsys.readouterr().err
    assert "stopped with 0 rows written; the same command with --resume continues" in error_output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "yes,no"}, 'labels was ["no","yes"], now ["yes","no"]'),
        ({"template": "T {text}"}, 'template was "{prefix}{text}", now "T {text}"'),
        ({"limit": "3"}, "limit was null, now 3"),
        ({"input": "other.jsonl"}, "rows.jsonl is not an input any more"),
    ],
)
def test_folder_of_another_job_is_refused_with_difference(
    run: Run, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "b"}\n')
    assert STOPPED in run()
    assert "go on with --resume" in run()
    line = run("--resume", **options)
    assert "holds another job" in line
    assert words in line
    assert STOPPED in run("--resume")


def test_complete_job_is_reported_and_starts_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STOPPED in run()
    summary = {"rows_in": 1, "rows_ok": 1}
    (tmp_path / "out" / "summary.json").write_text(json.dumps(summary))
    words = ["--input", "rows.jsonl", "--output", "out", "--labels", "no,yes", "--model", "bundled"]
    assert main(["bulk", *words, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_ray_job_must_not_write_into_working_directory_copy() -> None:
    here = Path("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1")
    with pytest.raises(ConfigError, match="give an absolute one"):
        check_job(bulk_job(Path("out")), here)
    check_job(bulk_job(Path("/shared/out")), here)
    check_job(bulk_job(Path("out")), Path("/somewhere"))
