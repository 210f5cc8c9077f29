"""Errors of the command line: one line, exit status 2, nothing started.

Errors that only a running Ray cluster can find are in tests/ray.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from cluster.cli.arguments import EXIT_ERROR, config_from_options
from cluster.cli.config_page import TARGET, config_keys, page
from cluster.cli.main import _parser, main
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from contracts.config import BUNDLED, TandemConfig
from contracts.import_path import ROOT
from tests.support.one_line_errors import error_line
from tests.support.tiny_models import Checkpoints

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the one error line of a command, which has `parts`."""

    def no_ray(*_: object, **__: object) -> None:
        pytest.fail("Ray was started for a configuration that cannot work")

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]  # the default port may be in use

    def call(command: str, *arguments: str, parts: Sequence[str] = ()) -> str:
        line = error_line(capsys, command, "--set", f"http.port={port}", *arguments)
        assert all(part in line for part in parts), (line, parts)
        return line

    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", no_ray)
    return call


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("groups.expert_rank=2", ["groups.expert_rank;", "did you mean groups.expert_ranks?"]),
        ("group.expert_ranks=2", ["unknown key group;", "did you mean groups?"]),
        ("zzz.a=1", ["unknown key zzz", "known: model, groups, channel"]),
        ("groups.expert_ranks=many", ["groups.expert_ranks", "int", "str"]),
        ("groups.attention_ranks=0", ["attention_ranks=0", "expert_ranks=1", "`groups`"]),
        ("schedule=3", ["schedule", "object"]),
        ("schedule.r1=0", ["schedule.r1", ">= 1"]),
        ("schedule.order=zigzag", ["schedule.order", "zigzag"]),
        ("http.port=99999", ["http.port", "65535"]),
        ("http.port=0", ["http.port=0", "--port"]),
        ("http.front=serve", ["http.front=serve", "direct"]),
        (
            "channel.heartbeat_timeout_s=0.1",
            ["heartbeat_timeout_s=0.1", "heartbeat_interval_s=0.2", "channel"],
        ),
        ("model.dtype=int8", ["model.dtype", "int8"]),
        ("schedule.r1", ["--set schedule.r1", "section.key=value"]),
        ("model.path.deeper=1", ["model.path", "str"]),
    ],
)
def test_unusable_setting_is_named(run: Run, setting: str, parts: list[str]) -> None:
    for command in ("serve", "doctor"):
        if command == "doctor" and setting.startswith(("http.port=0", "http.front")):
            continue  # valid configurations, but not for `tandem serve`
        run(command, "--set", setting, parts=parts)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.yaml", b"groups:\n  expert_ranks: [1\n", ["a.yaml", "line"]),
        ("a.yaml", b"model: \xff\xfe", ["a.yaml", "not UTF-8 at byte 7"]),
        ("a.yaml", b"- groups\n- model\n", ["a.yaml", "sections with keys", "list"]),
        ("a.yaml", b"grups:\n  expert_ranks: 2\n", ["a.yaml", "grups", "did you mean groups?"]),
        ("a.toml", b"[groups\n", ["a.toml"]),
        ("a.toml", b"[groups]\nexpert_ranks = '2'\n", ["a.toml", "groups.expert_ranks", "str"]),
    ],
)
def test_unusable_configuration_file_is_named(
    run: Run, tmp_path: Path, name: str, content: bytes, parts: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    run("serve", "--config", str(tmp_path / name), parts=parts)


def test_unreadable_configuration_file_is_named(run: Run, tmp_path: Path) -> None:
    run("serve", "--config", str(tmp_path / "none.yaml"), parts=["No such file"])
    run("serve", "--config", str(tmp_path), parts=["Is a directory"])


# --- models


@pytest.fixture
def model(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model")


def truncate(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (shutil.rmtree, ["no such folder"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (truncate, ["model.safetensors", "truncated"]),
    ],
)
def test_unusable_model_is_reported(
    run: Run, model: Path, damage: Callable[[Path], object], parts: list[str]
) -> None:
    damage(model)
    run("serve", "--model", str(model), parts=parts)


# --- tokenizers and chat templates


def in_config(**fields: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))

    return write


def template(source: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_bytes(source)


BROKEN_TEXT: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda folder: (folder / "tokenizer.json").unlink(), ["no tokenizer.json"]),
    (lambda folder: (folder / "tokenizer.json").write_text('{"a"'), ["tokenizer.json", "read"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text("{"), ["tokenizer_config.json"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), ["tokenizer_config.json"]),
    (in_config(chat_template=[{"template": "a"}]), ["tokenizer_config.json", "chat_template"]),
    (in_config(added_tokens_decoder={"x": {}}), ["tokenizer_config.json", "added_tokens_decoder"]),
    (in_config(added_tokens_decoder=[1]), ["tokenizer_config.json", "added_tokens_decoder"]),
    (template(b"{% for message in"), ["chat template", "end of template"]),
    (template(b"{% if %}"), ["chat template"]),
    (template(b"\xff\xfe{{ messages }}"), ["chat_template.jinja", "UTF-8"]),
    (template(b"{{ messages[0].content.nothing.at_all }}"), ["chat template", "Hello"]),
    (template(b"{{ raise_exception('no chats here') }}"), ["chat template", "no chats here"]),
]


@pytest.mark.parametrize(("broken", "parts"), BROKEN_TEXT)
def test_serve_and_doctor_report_unusable_tokenizer_or_chat_template(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    broken: Callable[[Path], object],
    parts: list[str],
) -> None:
    folder = shutil.copytree(resolve_model_folder(BUNDLED), tmp_path / "model")
    broken(folder)
    run("serve", "--model", str(folder), parts=parts)
    assert main(["doctor", "--model", str(folder), "--json"]) == 2
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["tokenizer"]["level"] == "error"
    assert all(part in findings["tokenizer"]["found"] for part in parts)


def test_doctor_warns_about_missing_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(resolve_model_folder(BUNDLED), tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    main(["doctor", "--model", str(folder), "--json"])
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["tokenizer"]["level"] == "warning"
    assert "/v1/chat/completions" in findings["tokenizer"]["advice"]


# --- this machine and the cluster


def test_busy_port_is_reported(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run("serve", "--port", str(port), parts=[f"http.port={port}", "in use", "--port"])


def test_foreign_host_address_is_reported(run: Run) -> None:
    host = ("--host", "203.0.113.7")
    run("serve", *host, "--api-key", "a", parts=["http.host=203.0.113.7 http"])
    run("serve", *host, parts=["without http.api_keys"])


def test_more_ranks_than_cores_is_reported(run: Run) -> None:
    cpus = 4 * (os.cpu_count() or 1)
    parts = [f"need {2 * cpus}", "groups.cpus_per_rank"]
    run("serve", "--set", f"groups.cpus_per_rank={cpus}", parts=parts)


def test_more_expert_ranks_than_experts_is_reported(run: Run) -> None:
    parts = ["groups.expert_ranks=17", "16 experts"]
    run("serve", "--expert-ranks", "17", "--set", "groups.cpus_per_rank=0", parts=parts)


def test_ray_address_without_listener_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    run("serve", "--set", f"groups.address={address}", parts=[address, "refused"])
    for given in (address, f"ray://{address}"):
        monkeypatch.setenv("RAY_ADDRESS", given)
        run("serve", parts=[address])


def test_foreign_server_at_ray_address_is_reported(run: Run) -> None:
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as sock:
            sock.recv(100)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        web = threading.Thread(target=answer, args=(listener,))
        web.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        run("serve", "--set", f"groups.address={address}", parts=["what listens there is not Ray"])
        web.join(10.0)


def test_unknown_ray_host_is_reported(run: Run) -> None:
    address = "no.such.host.invalid:6379"
    run("serve", "--set", f"groups.address={address}", parts=[address])


# --- commands


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serve", "--help"], ["doctor", "--help"]])
def test_help_exits_without_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == (0 if arguments else 2)
    out, err = capsys.readouterr()
    assert "tandem" in out + err
    if len(arguments) == 2:
        assert "example:" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sevre"], "did you mean serve?"),
        (["serve", "--port", "abc"], "--port"),
        (["serve", "--prot", "1"], "tandem serve: error: unrecognized arguments: --prot 1"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["bulk"], "--input"),
        (["serve", "--port"], "--port: expected one argument; see tandem serve --help"),
        ([], "COMMAND"),
    ],
)
def test_wrong_argument_is_one_line_with_suggestion(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line in err


@pytest.mark.long
def test_closed_output_pipe_ends_the_command() -> None:
    for more in ([], ["--json"]):
        command = [sys.executable, "-m", "cluster", "config", *more]
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as stdout:
            done = subprocess.run(
                command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False
            )
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "status", "words"),
    [
        ("exec {command} > /dev/full", EXIT_ERROR, "tandem config: No space left on device"),
        ("exec {command} <&- >&-", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec {command}", 0, ""),
        ("exec {command} <&- >&- 2>&-", 0, ""),
        ("cd $(mktemp -d); chmod 0 .; exec {unprivileged} {command}", 0, ""),
        ("cd $(mktemp -d); rmdir $PWD; exec {command}", EXIT_ERROR, "the current folder: No such"),
    ],
)
def test_command_without_streams_or_folder_ends_with_one_line(
    start: str, status: int, words: str
) -> None:
    unprivileged = "" if os.geteuid() else "unshare --user --map-user=12345"
    if subprocess.run([*unprivileged.split(), "true"], check=False).returncode:
        pytest.skip("root without user namespaces may read any folder")
    command = f"{sys.executable} -P -m tandem config"
    command = start.format(unprivileged=unprivileged, command=command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert done.stderr.count("\n") == bool(words)


def test_options_override_settings_override_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("groups: {attention_ranks: 5, expert_ranks: 5}\nhttp: {port: 5}\n")
    settings = ["--set", "groups.attention_ranks=6", "--set", "groups.expert_ranks=6"]
    options = ["--config", str(path), *settings, "--expert-ranks", "7"]
    config = config_from_options(_parser().parse_args(["serve", *options]))
    assert (config.http.port, config.groups.attention_ranks, config.groups.expert_ranks) == (
        5,
        6,
        7,
    )


def test_every_key_is_printed_with_default_and_accepted_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["config", "--set", "schedule.r1=4", "--set", "http.api_keys=[secret]", "--json"]) == 0
    )
    out = capsys.readouterr().out
    found = {key["key"]: key for key in json.loads(out)}
    tree = msgspec.to_builtins(TandemConfig())
    assert set(found) == {f"{section}.{key}" for section in tree for key in tree[section]}
    r1 = found["schedule.r1"]
    assert (r1["value"], r1["default"], r1["takes"]) == (4, 2, "int >= 1")
    assert found["groups.placement"]["takes"] == "pack, spread"
    assert found["log.level"]["meaning"] == "Minimum level of logged events."
    assert found["prefill.saturation_margin"]["takes"] == "float >= 0, <= 10"
    assert "secret" not in out


def test_every_key_has_a_meaning() -> None:
    without = [key.key for key in config_keys(TandemConfig()) if not key.meaning.endswith(".")]
    assert not without, "put a sentence below the field in contracts/config.py"


def test_every_time_and_size_has_a_unit() -> None:
    units = {"_per_s": "per second", "_s": "seconds", "_bytes": "bytes"}
    for key in config_keys(TandemConfig()):
        ending = next((ending for ending in units if key.key.endswith(ending)), None)
        if ending is not None:
            assert units[ending] in key.meaning.lower(), key.key


def test_configuration_page_is_up_to_date() -> None:
    stored = TARGET.read_text(encoding="utf-8")
    assert stored == page(), "run `python -m cluster.cli.config_page`"
