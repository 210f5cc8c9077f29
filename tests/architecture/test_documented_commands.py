"""Every command of README.md and the pages for users is tried, or named with the reason why not.

Those that need no server are run here, from an empty folder; the others where the table says.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES
from cluster.cli.main import main
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from contracts.loading import load_config
from tests.support.documented import DOCUMENTS, ROOT, Command, commands_of, documented
from tests.support.documented_table import TESTED, file_running, is_name

Run = Callable[[str], subprocess.CompletedProcess[str]]
COMMANDS = documented()
BIN = Path(sys.executable).parent
PAGES = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
_SPEC = re.compile(r"^\$ cat (\w+.json)\n(.*)$", re.MULTILINE)
_SIZED = re.compile(r"^\$ (tandem plan \w+s\.json)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ANSWER = re.compile(r"^\$ tandem plan spec.json\n(.*)$", re.MULTILINE)


def texts(pattern: str) -> list[str]:
    """Documented commands, each once."""
    return sorted({command.text for command in COMMANDS if re.match(pattern, command.text)})


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user's shell would, with the package's own folder of commands first."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "100"}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """As `run`, but a command of ours has this process: without the seconds of an import."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")

    def run_here(text: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = shlex.split(text)
        if program != "tandem":
            return run(text, folder)
        try:
            status = main(arguments)
        except SystemExit as ended:  # argparse, after its help
            status = int(ended.code or 0)
        return subprocess.CompletedProcess(text, status, *capsys.readouterr())

    return run_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty, but for what the documents say the user has."""
    (tmp_path / "DIR").symlink_to(resolve_model_folder(BUNDLED))
    specs = {found for page in PAGES for found in _SPEC.findall(page)}
    assert len({name for name, _ in specs}) == len(specs) >= 3, "one file of a name"
    for name, spec in specs:
        (tmp_path / name).write_text(spec, encoding="utf-8")
    (config,) = (command.text for command in COMMANDS if command.language == "yaml")
    (tmp_path / "tandem.yaml").write_text(config, encoding="utf-8")
    return tmp_path


def test_every_documented_command_is_in_the_table() -> None:
    unknown = [
        f"{command.document}:{command.line}: {command.text or command.language}"
        for command in COMMANDS
        if file_running(command) is None
    ]
    assert not unknown, f"add them to tests/support/documented_table.py: {unknown}"


def test_every_command_of_the_table_exists() -> None:
    files = set(TESTED.values())
    assert all((ROOT / name).is_file() for name in files), files
    assert {command.document for command in COMMANDS} == set(DOCUMENTS)


@pytest.mark.long
def test_a_documented_name_is_a_command(folder: Path) -> None:
    listed = run("tandem --help", folder).stdout
    for name in {command.text for command in COMMANDS if is_name(command.text)}:
        assert re.search(rf"^ +{name.split()[1]}\b", listed, re.MULTILINE), name


@pytest.mark.long
@pytest.mark.parametrize("text", texts(r"tandem plan |cat "))
def test_plans_are_made_as_documented(here: Run, text: str) -> None:
    text = "tandem plan spec.json --beyond" if text == "tandem plan --beyond" else text
    done = here(text)
    assert done.returncode == 0, done.stderr
    if text == "tandem plan spec.json":
        first = done.stdout.split("\n")[0]  # of a narrower terminal than the documents'
        shown = [line for page in PAGES for line in _ANSWER.findall(page)]
        assert shown
        assert all(line.startswith(first) for line in shown), shown
    for command, lines in (found for page in PAGES for found in _SIZED.findall(page)):
        if command == text:
            printed = {line.strip() for line in done.stdout.splitlines()}
            assert {line.strip() for line in lines.splitlines()} <= printed, done.stdout
    if text == "tandem plan --help":
        assert all(option in done.stdout for option in ("--json", "--beyond", "--picture"))


@pytest.mark.long
@pytest.mark.parametrize("text", texts("tandem doctor (?!--url).+"))
def test_doctor_is_run_as_documented(here: Run, text: str) -> None:
    done = here(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_configuration_is_shown_as_documented(folder: Path) -> None:
    for text in texts("tandem config"):
        done = run(text, folder)
        assert done.returncode == 0, done.stderr
        assert "max_batch_tokens" in done.stdout


@pytest.mark.long
def test_the_documented_file_is_a_configuration(folder: Path) -> None:
    config = load_config(folder / "tandem.yaml", ["schedule.r1=4"])
    assert (config.model.path, config.schedule.r1) == (BUNDLED, 4)


@pytest.mark.long
def test_documented_benchmarks_are_there() -> None:
    for text in texts("python -m benchmarks"):
        module, *rest = text.split(" ")[2:]
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), text
        if module == "benchmarks" and not rest[0].startswith("--"):
            assert rest[0] in CASES, text


def test_commands_are_found_in_blocks() -> None:
    block = """tandem serve --model DIR      # a remark
$ cat a.json
{"a": 1}
curl http://x -H 'a: b' \\
  -d '{"a": [1,
       2]}'
output of tandem
RAY_ADDRESS=a:1 tandem doctor --json
serve run x &              (then)
"""
    assert commands_of(block) == [
        "tandem serve --model DIR",
        "cat a.json",
        "curl http://x -H 'a: b' -d '{\"a\": [1, 2]}'",
        "RAY_ADDRESS=a:1 tandem doctor --json",
        "serve run x &",
    ]


def test_unlisted_command_is_reported() -> None:
    assert file_running(Command("README.md", 1, "tandem fly --away")) is None
    assert file_running(Command("README.md", 1, "", "rust")) is None
