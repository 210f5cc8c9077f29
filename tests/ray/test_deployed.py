"""deploy/serve.yaml by `serve run` and `serve deploy`, and the RayJob by `ray job submit`."""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from benchmarks.support.bulk_rows import RowsDone, check, write_rows
from cluster.http.server import free_port
from cluster.serving.settings import KEY_VARIABLE
from tests.support.otlp_collector import Collector
from tests.support.ray_head import BIN, ENVIRONMENT, ROOT, RayHead, check_complete, ray_head
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

DEADLINE_S = 180.0
ROWS = 60_000  # more than are answered until the new ranks run
DRAIN_S = 500.0  # an answer of 1,500 tokens takes minutes beside other tests


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with ray_head(dashboard=True) as head:
        yield head


@functools.cache
def proxy_port() -> int:
    """Return the port of all files: Serve's proxy keeps its first one."""
    return free_port()


class File:
    """deploy/serve.yaml on a port that is free, with a small KV pool."""

    def __init__(self, folder: Path) -> None:
        document = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
        self.port = document["http_options"]["port"] = proxy_port()
        document["applications"][0]["args"]["kv"]["pool_tokens"] = 4096
        document["applications"][0]["args"].setdefault("http", {})["drain_timeout_s"] = DRAIN_S
        self.path = folder / "serve.yaml"
        self.path.write_text(yaml.safe_dump(document), encoding="utf-8")

    def without_applications(self) -> Path:
        """Return the same file, by which `serve deploy` removes all applications."""
        return self._changed("none.yaml", {**self._document(), "applications": []})

    def with_changes(self, changes: dict[str, Any], **application: Any) -> Path:
        """Return the same file with other keys of the arguments and of the application."""
        document = self._document()
        (one,) = document["applications"]
        for key, value in changes.items():
            section, _, name = key.partition(".")
            one["args"].setdefault(section, {})[name] = value
        one.update(application)
        return self._changed("changed.yaml", document)

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load(self.path.read_text(encoding="utf-8"))
        return document

    def _changed(self, name: str, document: dict[str, Any]) -> Path:
        path = self.path.with_name(name)
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def wait_healthy(self, process: subprocess.Popen[bytes] | None = None) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not self._is_healthy():
            assert time.monotonic() < end_s
            assert process is None or process.poll() is None
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200
        return False

    def answers(self, model: str = "bundled") -> bool:
        body = {"model": model, "prompt": "The", "max_tokens": 4}
        answer = httpx.post(self._url, json=body, timeout=DEADLINE_S)
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])

    @contextlib.contextmanager
    def long_answer(self, model: str = "bundled") -> Iterator[Iterator[str]]:
        """Yield the lines of an answer after its first line."""
        body = {
            "model": model,
            "prompt": "The",
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    wait_until(is_so, otherwise, DEADLINE_S)


def run(cluster: RayHead, *words: str) -> str:
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def entrypoint(folder: Path) -> str:
    """Return the RayJob's command with its volume in `folder`, which has rows."""
    job = yaml.safe_load((ROOT / "deploy/kubernetes/bulk_job.yaml").read_text(encoding="utf-8"))
    text: str = job["spec"]["entrypoint"]
    rows = pyarrow.table({"id": [1, 2, 3], "text": ["It works.", "It broke.", "Fine."]})
    (folder / "reviews").mkdir()
    pyarrow.parquet.write_table(rows, folder / "reviews" / "rows.parquet")
    return text.replace("/shared", str(folder))


def test_serve_run_and_job_entrypoint_answer(cluster: RayHead, tmp_path: Path) -> None:
    file = File(tmp_path)
    with subprocess.Popen(
        [str(BIN / "serve"), "run", str(file.path)],
        env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            file.wait_healthy(server)
            assert file.answers()
            words = shlex.split(entrypoint(tmp_path))
            run(cluster, "ray", "job", "submit", "--address", cluster.dashboard, "--", *words)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(DEADLINE_S)
    (part,) = (tmp_path / "reviews-classified").glob("part-*.jsonl")
    answers = [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
    assert sorted(answer["id"] for answer in answers) == [1, 2, 3]
    assert {answer["label"] for answer in answers} <= {"negative", "positive"}


def test_redeployed_or_removed_application_completes_answers(
    cluster: RayHead, tmp_path: Path
) -> None:
    file = File(tmp_path)
    deploy = ("serve", "deploy", "--address", cluster.dashboard)
    run(cluster, *deploy, os.fspath(file.path))
    file.wait_healthy()
    assert file.answers()
    assert "RUNNING" in run(cluster, "serve", "status", "--address", cluster.dashboard)
    with file.long_answer() as lines:
        run(cluster, *deploy, os.fspath(file.with_changes({"model.name": "anew"})))
        check_complete(lines)
    until(lambda: file.answers("anew"), "the redeployed application does not answer")
    until(lambda: len(cluster.running("Groups")) == 1, "the replaced ranks have not ended")
    with file.long_answer("anew") as lines:
        run(cluster, *deploy, os.fspath(file.without_applications()))
        assert not file.answers("anew")
        check_complete(lines)
    until(lambda: not cluster.running("Groups"), "it has not ended")


def test_bulk_job_continues_with_ranks_of_redeployed_application(
    cluster: RayHead, tmp_path: Path
) -> None:
    rows, output, file = tmp_path / "rows.jsonl", tmp_path / "out", File(tmp_path)
    write_rows(rows, ROWS, seed=0, data=None)
    args = {"prefill.engine": "tests.support.stub_rank:stub_rank", "http.drain_timeout_s": 1}
    deploy = ("serve", "deploy", "--address", cluster.dashboard)
    run(cluster, *deploy, os.fspath(file.with_changes(args)))
    file.wait_healthy()
    job = subprocess.Popen(
        [
            *(str(BIN / "tandem"), "bulk", "--address", cluster.address, "--id-field", "id"),
            *("--input", str(rows), "--output", str(output), "--labels", "a,b"),
        ],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        done = RowsDone(output)
        until(lambda: done.count() > 0 or job.poll() is not None, "no row is answered")
        run(cluster, *deploy, os.fspath(file.with_changes({**args, "kv.pool_tokens": 8192})))
        _, errors = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, errors
    assert "the application was deployed again" in errors
    assert check(output, ROWS)["rows_ok"] == ROWS


KEY = {"authorization": "Bearer secret"}
COMPLETION = {"model": "bundled", "prompt": "The", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "bundled", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PATHS = (
    *("/health", "/version", "/openapi.json", "/load", "/metrics", "/status", "/scale", "/nope"),
    *("/v1/models", "/v1/models/a%2Fb", "/v1/completions", "/v1/files", "/v1/batches/x", "/v1//x/"),
)
SURFACE: list[tuple[str, str, Any]] = [
    *((method, path, None) for path in PATHS for method in ("GET", "HEAD", "OPTIONS", "DELETE")),
    *(("GET", path, None) for path in ("/trace?seconds=x", "/health?" + "x" * 3000)),
    *(("POST", "/v1/completions", body) for body in (COMPLETION, b"{", b"", b"x" * (9 << 20))),
    ("POST", "/v1/completions", {**COMPLETION, "stream": True}),
    ("POST", "/v1/completions", {**COMPLETION, "model": "x"}),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": "a " * 100_000}),
    ("POST", "/v1/chat/completions", {**CHAT, "temperature": 0}),
    ("POST", "/v1/chat/completions", {**CHAT, "temperature": 0, "stream": True}),
    ("POST", "/v1/classify", {"model": "bundled", "input": ["a"], "labels": [" no", " yes"]}),
    ("POST", "/tokenize", {"model": "bundled", "prompt": "Hello"}),
    *(
        ("POST", f"/{path}", {})
        for path in ("scale", "health", "detokenize", "v1/score", "v1/files")
    ),
]


def answer_of(client: httpx.Client, method: str, path: str, body: Any) -> tuple[Any, ...]:
    """Return status, headers and body without what differs between two requests."""
    content = body if isinstance(body, bytes | None) else json.dumps(body)
    answer = client.request(method, path, content=content)
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", answer.text)
    if path == "/metrics":
        text = "\n".join(re.findall("^# HELP .*", text, re.M))
    elif path == "/status" and text:
        text = str(sorted(answer.json()))
    elif (
        isinstance(body, dict) and "stream" in body
    ):  # tokens that arrive together are sent together
        found = re.findall(r'"(?:text|content)":"([^"]*)"|(\[DONE\])', text)
        text = "".join(part for each in found for part in each)
    headers = answer.headers.multi_items()
    ignored = ("server", "date", *(("content-length",) if path in ("/metrics", "/status") else ()))
    return answer.status_code, sorted(one for one in headers if one[0] not in ignored), text


def test_http_surface_is_that_of_tandem_serve(cluster: RayHead, tmp_path: Path) -> None:
    file, port = File(tmp_path), free_port()
    collector, spans = Collector(), list[bytes]()
    args: dict[str, Any] = {"groups.attention_ranks": 1, "groups.expert_ranks": 1}
    args |= {
        "kv.pool_tokens": 4096,
        "trace.otlp_endpoint": f"http://127.0.0.1:{collector.server_port}",
    }
    environment = {"env_vars": {KEY_VARIABLE: "secret"}}
    path = os.fspath(file.with_changes(args, runtime_env=environment))
    run(cluster, "serve", "deploy", "--address", cluster.dashboard, path)
    file.wait_healthy()
    options = [f"--set={key}={value}" for key, value in args.items()]
    options += ["--set=groups.prefill_ranks=1", "--port", str(port), "--name", "direct"]
    server = subprocess.Popen(
        [str(BIN / "tandem"), "serve", *options],
        env={**ENVIRONMENT, "RAY_ADDRESS": cluster.address, KEY_VARIABLE: "secret"},
        stdout=subprocess.PIPE,
        text=True,
    )
    headers = {**KEY, "x-request-id": "mine", "content-type": "application/json"}
    with server, contextlib.ExitStack() as stack:
        stack.callback(collector.shutdown)
        stack.callback(server.send_signal, signal.SIGINT)
        assert server.stdout is not None
        assert any(line.startswith("ready in ") for line in server.stdout)
        behind, direct = (
            stack.enter_context(
                httpx.Client(base_url=f"http://127.0.0.1:{one}", headers=headers, timeout=60)
            )
            for one in (file.port, port)
        )
        for client, one in ((behind, file.port), (direct, port)):
            client.headers["traceparent"] = f"00-{one:032x}-{1:016x}-01"
        for request in SURFACE:
            answer = answer_of(behind, *request)
            assert answer == answer_of(direct, *request), request[:2]
            assert answer[1].count(("x-request-id", "mine")) == 1
        for client in (behind, direct):
            refused = client.get("/v1/models", headers={"authorization": "Bearer other"})
            assert refused.status_code == 401
            with client.stream(
                "POST", "/v1/completions", json={**COMPLETION, "max_tokens": 900, "stream": True}
            ):
                pass  # leave
            until(functools.partial(has_stopped, client), "it goes on without its client")

        def are_exported() -> bool:
            spans.append(collector.received.get(timeout=DEADLINE_S)[1])
            return all(one.to_bytes(16, "big") in b"".join(spans) for one in (file.port, port))

        until(are_exported, "spans of the clients' traces are missing")


def has_stopped(client: httpx.Client) -> bool:
    gone = re.compile('outcome="client_gone",pipeline="generation"} [1-9]')
    return gone.search(client.get("/metrics").text) is not None


UNUSABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"groups.prefill_ranks": 40}, {}, "ranks need"),
    ({"groups.cpus_per_rank": 3.5}, {}, "ranks need"),
    ({"model.path": "/no/such/folder"}, {}, "no such folder"),
    ({"http.max_connections": 9}, {}, "http.max_connections has no effect here"),
    ({}, {"runtime_env": {"env_vars": {KEY_VARIABLE: ""}}}, f"{KEY_VARIABLE}: api_keys"),
    ({"kv.pool_tokens": 8192}, {"deployments": [{"name": "Groups", "num_replicas": 2}]}, "Groups"),
]


def test_deployment_that_cannot_work_leaves_running_server(
    cluster: RayHead, tmp_path: Path
) -> None:
    file = File(tmp_path)
    deploy = ("serve", "deploy", "--address", cluster.dashboard)
    run(cluster, *deploy, os.fspath(file.path))
    file.wait_healthy()
    until(file.answers, "it does not answer")
    ranks = {one.pid for one in cluster.running("ray::prefill-")}
    for args, application, reason in UNUSABLE:
        path = file.with_changes(args, **application)
        run(cluster, *deploy, os.fspath(path))

        def is_refused(reason: str = reason) -> bool:
            shown = run(cluster, "serve", "status", "--address", cluster.dashboard)
            return "DEPLOY_FAILED" in shown and reason in " ".join(shown.split())

        until(is_refused, reason)
        assert file.answers()
        assert {one.pid for one in cluster.running("ray::prefill-")} == ranks
