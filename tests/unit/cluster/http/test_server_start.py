"""HTTP options of `tandem serve`, and its readiness check."""

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.cli.main import main
from cluster.http import server
from cluster.http.server import check_tls
from cluster.serving import application
from cluster.serving import server as serving
from cluster.serving.settings import KEY_VARIABLE, with_variables
from contracts.config import HttpConfig, TandemConfig
from contracts.errors import ConfigError, LaunchError, ResourceError, TandemError
from tests.support.api_harness import TIMEOUT_S
from tests.support.front_harness import LOOPS, get, read_answer, serve_front
from tests.support.waiting import wait_until


class Groups:
    """Handle of a Groups deployment. ingress: its reply about the ingress."""

    def __init__(self, ingress: Callable[[], TandemError | None]) -> None:
        self.is_served = False
        self.ingress = self._method(ingress)
        self.served = self._method(self._serve)

    def _serve(self) -> None:
        self.is_served = True

    @staticmethod
    def _method(answer: Any) -> Any:
        response = SimpleNamespace(result=lambda timeout_s: answer())
        return SimpleNamespace(remote=lambda: response)


@pytest.fixture(autouse=True)
def _another_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200))
    monkeypatch.setattr(application, "check_deployed", lambda _: None)


def test_answer_of_other_server_on_port_is_not_accepted() -> None:
    def no_reply() -> None:
        raise TimeoutError

    in_use = ResourceError("http.host=h http.port=1: Address already in use")
    groups = Groups(lambda: in_use)
    deployed = application.DeployedApp("tandem", "id", groups)
    with pytest.raises(ResourceError, match="already in use"):
        serving._wait_healthy("http://127.0.0.1:1", deployed, 5.0)
    assert not groups.is_served
    silent = application.DeployedApp("tandem", "id", Groups(no_reply))
    with pytest.raises(LaunchError, match=r"the ingress did not listen within 0.2 s"):
        serving._wait_healthy("http://127.0.0.1:1", silent, 0.2)
    assert not silent.groups.is_served


def test_answer_of_own_server_is_accepted() -> None:
    groups = Groups(lambda: None)
    deployed = application.DeployedApp("tandem", "id", groups)
    serving._wait_healthy("http://127.0.0.1:1", deployed, 5.0)
    assert groups.is_served


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[TandemConfig]:
    """Capture the configurations that `tandem serve` uses."""
    configs: list[TandemConfig] = []

    def stop(config: TandemConfig) -> None:
        configs.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr(serving, "preflight", stop)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return configs


def test_keys_are_command_line_options(served: list[TandemConfig]) -> None:
    assert main(["serve", "--api-key", "one", "--api-key", "two", "--root-path", "/llm"]) == 2
    assert served[0].http.api_keys == ["one", "two"]
    assert served[0].http.root_path == "/llm"


def test_environment_key_is_used_without_other_keys(
    served: list[TandemConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert main(["serve"]) == main(["serve", "--api-key", "one"]) == 2
    assert [config.http.api_keys for config in served] == [["secret"], ["one"]]


@pytest.mark.parametrize("key", ["", "two words"])
def test_empty_environment_key_does_not_open_server(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE}: api_keys.0."):
        with_variables(TandemConfig(), {KEY_VARIABLE: key})


def test_empty_command_line_key_is_rejected(
    served: list[TandemConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--api-key", ""]) == 2
    assert served == []
    assert "api_keys[0] is empty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return fields of HttpConfig with a self-signed certificate for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> dict[str, Any]:
    paths = {"tls_certificate": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-out", paths["tls_certificate"], "-keyout", paths["tls_key"]),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return paths


@pytest.mark.parametrize("kind", LOOPS)
def test_server_with_certificate_uses_https(certificate: dict[str, Any], kind: str) -> None:
    context = ssl.create_default_context(cafile=certificate["tls_certificate"])
    limits: Any = {"max_header_bytes": 1024, "header_timeout_s": 0.5, "max_connections": 2}
    with serve_front(loop_kind=kind, **limits, **certificate) as front:

        def connect() -> ssl.SSLSocket:
            return context.wrap_socket(front.connect(), server_hostname="localhost")

        with connect() as line:
            line.sendall(get("/echo"))
            assert read_answer(line).status == 200
            line.sendall(get("/echo", "X-Much: " + "a" * 1024))
            assert read_answer(line).status == 431
        with front.connect() as plain:
            plain.sendall(get("/echo"))
            assert is_ended_on_any_error(plain)
        with contextlib.ExitStack() as lines:  # during their handshakes
            silent = [lines.enter_context(front.connect()) for _ in range(6)]
            with connect() as line:
                line.sendall(get("/echo"))
                assert read_answer(line).status == 200, "others are still served"
            assert all(is_ended_on_any_error(line) for line in silent)


def is_ended_on_any_error(line: socket.socket) -> bool:
    """Return whether the connection ends. A TLS server may send an alert first."""
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_invalid_certificate_is_rejected_before_start(
    certificate: dict[str, Any], tmp_path: Path
) -> None:
    check_tls(HttpConfig(**certificate))
    missing = {**certificate, "tls_key": str(tmp_path / "none.pem")}
    with pytest.raises(ConfigError, match=r"http.tls_key=.*: no such file"):
        check_tls(HttpConfig(**missing))
    (tmp_path / "text.pem").write_text("no certificate")
    broken = {**certificate, "tls_certificate": str(tmp_path / "text.pem")}
    with pytest.raises(ConfigError, match="give PEM files that belong together"):
        check_tls(HttpConfig(**broken))
    locked = {**certificate, "tls_key": str(tmp_path / "locked.pem")}
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in"]
    command += [certificate["tls_key"], "-out", locked["tls_key"]]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"http.tls_key .* encrypted with a passphrase"):
        check_tls(HttpConfig(**locked))


@pytest.mark.parametrize(
    ("host", "options", "reason"),
    [
        ("localhost", ["--cacert", "tls_certificate"], None),
        ("localhost", [], "certificate verify failed"),
        ("127.0.0.1", ["--cacert", "tls_certificate"], "certificate verify failed"),
        ("127.0.0.1", ["--insecure"], None),
        ("localhost", ["--cacert", "tls_key"], "give a PEM file"),
    ],
)
def test_command_line_verifies_the_certificate(
    certificate: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    host: str,
    options: list[str],
    reason: str | None,
) -> None:
    options = [certificate.get(option, option) for option in options]
    with serve_front(**certificate) as front:
        url = f"https://{host}:{front.port}"
        assert main(["status", "--url", url, *options]) != 0  # the server has no status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error if reason else "certificate" not in error


def test_renewed_certificate_is_used_and_invalid_one_ignored(
    certificate: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "TLS_CHECK_TICKS", 1)
    path = Path(certificate["tls_certificate"])
    first = path.read_text()
    with serve_front(**certificate) as front:

        def served() -> str:
            return ssl.get_server_certificate(("127.0.0.1", front.port))

        path.write_text("no certificate")
        wait_until(lambda: "certificate_rejected" in caplog.text, "it is not noticed", TIMEOUT_S)
        assert served() == first
        make_certificate(path.parent)
        assert path.read_text() != first
        wait_until(lambda: served() == path.read_text(), "the new one is not used", TIMEOUT_S)
