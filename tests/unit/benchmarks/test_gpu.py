"""All that needs a GPU as one command: what fails, hangs or lacks something is output, and ends."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import load
from benchmarks.gpu import NO_GPU, PARTS, Part
from benchmarks.harness import options_of

CODE = "import pathlib, sys; "


class Script(Part):
    """A part that runs a line of Python."""

    def command(self, results: Path) -> list[str]:
        (code,) = self.module
        return [sys.executable, "-c", code.replace("RESULTS", str(results))]


def script(name: str, code: str, needs: Sequence[str] = ()) -> Script:
    return Script(name, f"runs {name}", (CODE + code,), needs)


WRITES = script("writes", "pathlib.Path('RESULTS/gpu_writes.json').write_text('{}')")
FAILS = script("fails", "sys.exit(7)")
LACKS = script("lacks", "pass", ("no_such_package",))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "")


@pytest.mark.usefixtures("with_gpu")
def test_parts_run_in_turn_and_the_table_has_their_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    assert gpu.main(["--results", str(folder)], [WRITES, FAILS, LACKS]) == 1
    output = capfd.readouterr().out
    assert "== writes: runs writes" in output
    rows = json.loads((folder / "gpu_parts.json").read_text())["summary"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "writes": "passed",
        "fails": "failed: exit status 7",
        "lacks": "not run: no no_such_package",
    }
    assert (folder / "gpu_writes.json").exists()
    assert gpu.main(["--results", str(folder), "--only", "writes"], [WRITES, FAILS]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("with_gpu")
def test_a_part_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "pathlib.Path('RESULTS/child').write_text(str(child.pid)); time.sleep(600)"
    )
    hangs, started_s = script("hangs", code), time.monotonic()
    outcome = gpu.run(hangs, tmp_path, limit_s=3.0)
    assert outcome.status == "failed: not done after 3 s"
    assert time.monotonic() - started_s < 60.0
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline_s = time.monotonic() + 20.0
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline_s, "it still runs"


def test_parts_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::3]] == [part.name for part in PARTS]
    assert [line.split(":")[0].split()[0] for line in lines if line[0] == " "] == [
        "one", "two",
    ] * len(PARTS)  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--only", "nothing"])
    assert ended.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--results", str(tmp_path / "none")]) == NO_GPU
    output = capfd.readouterr().out
    assert output.startswith("no GPU here, nothing was run: torch")
    assert output.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_every_part_is_there_and_knows_its_arguments(tmp_path: Path) -> None:
    for part in PARTS:
        command = part.command(tmp_path)
        assert command[1] == "-m"
        if command[2] == "pytest":
            paths = [word for word in command if word.startswith("tests/")]
            assert paths
            assert all((gpu.ROOT / path).exists() for path in paths)
        else:
            assert command[2] == "benchmarks"
            assert options_of(load(command[3]), command[4:])
            assert str(tmp_path / command[3]) in command[-1]  # the name the results page looks for
