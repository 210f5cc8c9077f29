"""Files and batches over HTTP, with openai's client where it has the call."""

import errno
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from openai.types import Batch

from cluster.batch.run import rows_in_flight
from cluster.http.row_client import MAX_FAILURES
from cluster.routing.rank_set import RoutingConfig
from contracts.config import BatchConfig, HttpConfig
from contracts.requests import Priority
from tests.support.api_harness import MODEL, TIMEOUT_S, Api, refused, serve_api
from tests.support.fake_rank import FakeRank
from tests.support.waiting import wait_until

COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"
SMALL = BatchConfig(file_bytes=4096, requests=5, key_batches=2, in_flight_rows=2)
KEYED = HttpConfig(api_keys=["first", "second"])


def line(custom_id: str, prompt: str = "a", url: str = COMPLETIONS, **fields: Any) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank("attention-0", lambda submit: [60, 61])


@pytest.fixture
def serve(folder: Path, rank: FakeRank, tmp_path: Path) -> Callable[..., Any]:
    return lambda **more: serve_api(folder, [rank], storage=tmp_path / "batches", **more)


@pytest.fixture
def api(serve: Callable[..., Any]) -> Iterator[Api]:
    with serve(batch=SMALL) as api:
        yield api


def upload(client: openai.OpenAI, *lines: str) -> str:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def start(client: openai.OpenAI, *lines: str) -> str:
    made = start_with(client, upload(client, *lines))
    assert made.status == "validating"
    return made.id


def start_with(client: openai.OpenAI, file: str) -> Batch:
    return client.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")


def ended(client: openai.OpenAI, batch: str) -> Batch:
    found: list[Batch] = []

    def is_ended() -> bool:
        found.append(client.batches.retrieve(batch))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    wait_until(is_ended, "the batch does not end", TIMEOUT_S, 0.02)
    return found[-1]


def results(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    assert len({each["id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def test_rows_are_answered_as_over_http(api: Api) -> None:
    client = api.openai
    rows = [line("a"), "", line("b", n=2), line("c", model="other"), line("d", stream=True)]
    batch = ended(client, start(client, *rows))
    assert batch.status == "completed"
    assert batch.request_counts
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    answers = results(client, batch.output_file_id)
    direct = api.post(COMPLETIONS, prompt="a", max_tokens=2).json()
    body = answers["a"]["response"]["body"]
    assert body["choices"] == direct["choices"]
    assert body["usage"]["completion_tokens"] == 2
    assert len(answers["b"]["response"]["body"]["choices"]) == 2
    errors = results(client, batch.error_file_id)
    assert errors["c"]["response"]["status_code"] == 404
    assert errors["d"]["response"]["body"]["error"]["param"] == "stream"
    assert api.rank.submits.get().priority is Priority.BE


@pytest.mark.parametrize(
    ("rows", "code", "number", "part"),
    [
        ([""], "empty_file", None, "no requests"),
        ([line("a"), "{"], "invalid_json_line", 2, "JSON"),
        ([line("a"), "", line("a")], "duplicate_custom_id", 3, "twice"),
        ([line("a", url="/v1/score")], "mismatched_endpoint", 1, "/v1/score"),
        ([line("")], "invalid_custom_id", 1, "512"),
        (['{"custom_id": "a"}'], "invalid_request", 1, "method: missing"),
        ([line("a").replace("POST", "GET")], "invalid_request", 1, "method"),
        ([line("a").partition('"body"')[0] + '"body": []}'], "invalid_request", 1, "body"),
        ([line(str(i)) for i in range(6)], "too_many_requests", None, "batch.requests"),
    ],
)
def test_wrong_input_fails_the_batch_with_its_line(
    api: Api, rows: list[str], code: str, number: int | None, part: str
) -> None:
    batch = ended(api.openai, start(api.openai, *rows))
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, number)
    assert part in (error.message or "")
    assert api.rank.submits.empty()


def test_cancelled_batch_keeps_answers_and_lists_the_rest(api: Api) -> None:
    client = api.openai
    api.rank.hold_after = 1
    batch = start(client, *[line(str(i)) for i in range(5)])
    wait_until(lambda: api.rank.submits.qsize() >= 2, "not sent", TIMEOUT_S, 0.02)
    assert client.batches.cancel(batch).status == "cancelling"
    found = ended(client, batch)
    assert found.status == "cancelled"
    errors = results(client, found.error_file_id)
    assert set(errors) == {str(i) for i in range(5)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="cancelled and cannot be"):
        client.batches.cancel(batch)


def test_rows_under_way_are_a_small_part_of_a_batch(serve: Callable[..., Any]) -> None:
    """20 losses repeat at most 0.5 % of 200,000 rows, and of 2,000,000."""
    for rows, in_flight in ((40, 32), (200_000, 50), (2_000_000, 500)):
        assert rows_in_flight(rows) == in_flight
    with serve() as api:
        api.rank.hold_after = 0
        batch = start(api.openai, *[line(str(i)) for i in range(40)])
        wait_until(lambda: api.rank.submits.qsize() >= 32, "not sent", TIMEOUT_S, 0.02)
        api.openai.batches.cancel(batch)
        ended(api.openai, batch)
        assert api.rank.submits.qsize() == 32


def test_keys_see_only_their_own(serve: Callable[..., Any]) -> None:
    with serve(batch=SMALL, http=KEYED) as api:
        one, two = (api.openai.with_options(api_key=key) for key in ("first", "second"))
        batch = start(one, line("a"))
        file = ended(one, batch).output_file_id
        assert file
        assert [each.id for each in one.batches.list().data] == [batch]
        assert not two.batches.list().data
        assert not two.files.list().data
        for call in (
            lambda: two.batches.retrieve(batch),
            lambda: two.batches.cancel(batch),
            lambda: two.files.retrieve(file),
            lambda: two.files.content(file),
            lambda: two.files.delete(file),
            lambda: start_with(two, file),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no"):
                call()
        refused(api.http.get("/v1/files"), 401, None, "API key")


@pytest.mark.parametrize("code", ["peer_dead", "peer_hung"])
def test_row_that_loses_ranks_is_given_up(api: Api, code: str) -> None:
    api.rank.fail_with = ("lost over it", code, 503)
    batch = ended(api.openai, start(api.openai, line("a")))
    error = results(api.openai, batch.error_file_id)["a"]["response"]
    assert (error["status_code"], error["body"]["error"]["code"]) == (503, code)
    assert api.rank.submits.qsize() == MAX_FAILURES * RoutingConfig().max_attempts


def test_limits_name_their_settings(api: Api) -> None:
    client = api.openai
    with pytest.raises(openai.APIStatusError, match="file_bytes") as error:
        upload(client, "x" * 5000)
    assert error.value.status_code == 413
    api.rank.hold_after = 0
    file = upload(client, line("a"))
    batches = [start_with(client, file).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="key_batches"):
        start_with(client, file)
    with pytest.raises(openai.ConflictError, match="is the input of batch_"):
        client.files.delete(file)
    for batch in batches:
        client.batches.cancel(batch)
        assert ended(client, batch).status == "cancelled"
    assert client.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError, match="input_file_id"):
        start_with(client, file)


FILE = ("file", ("a.jsonl", b"{}"))


@pytest.mark.parametrize(
    ("parts", "status", "param", "part"),
    [
        ([FILE], 400, "purpose", "missing"),
        ([FILE, ("purpose", (None, b"fine-tune"))], 400, "purpose", "use batch"),
        ([("purpose", (None, b"batch"))], 400, "file", "missing"),
        ([FILE, FILE, ("purpose", (None, b"batch"))], 400, "file", "twice"),
        ([FILE, ("purpose", (None, b"b" * 2000))], 400, None, "longer than"),
        (
            [FILE, ("purpose", (None, b"batch")), ("expires_after[seconds]", (None, b"5"))],
            *(400, "expires_after", "expires_after[seconds]: Expected"),
        ),
    ],
)
def test_wrong_forms_are_refused(
    api: Api, parts: list[Any], status: int, param: str | None, part: str
) -> None:
    refused(api.http.post("/v1/files", files=parts), status, param, part)
    assert not api.openai.files.list().data


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 415),
        ("multipart/form-data; boundary=x", b"no form", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n", 400),
    ],
)
def test_malformed_uploads_are_refused(
    api: Api, content_type: str, body: bytes, status: int
) -> None:
    headers = {"content-type": content_type}
    refused(api.http.post("/v1/files", content=body, headers=headers), status, None)


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"completion_window": "1y"}, "completion_window", "matching"),
        ({"completion_window": "9999d"}, "completion_window", "30d"),
        ({"endpoint": "/v1/embeddings"}, "endpoint", "/v1/embeddings"),
        ({"metadata": {"a": "b" * 600}}, "metadata[...]", "512"),
        ({"input_file_id": None}, "input_file_id", "str"),
        ({"other": 1}, "other", "not a field"),
    ],
)
def test_wrong_batches_are_refused(api: Api, fields: dict[str, Any], param: str, part: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": COMPLETIONS, "completion_window": "24h"}
    refused(api.http.post("/v1/batches", json={**body, **fields}), 400, param, part)


def test_lists_are_paged(api: Api) -> None:
    client = api.openai
    made = {upload(client, line(str(i))) for i in range(5)}
    assert {each.id for each in client.files.list(limit=2)} == made  # its client reads all pages
    latest = [each.id for each in client.files.list(limit=5).data]
    assert [each.id for each in client.files.list(limit=5, order="asc").data] == latest[::-1]
    refused(api.http.get("/v1/files?limit=0"), 400, "limit", ">= 1")
    refused(api.http.get("/v1/files?after=none"), 400, "after", "not in this list")


def test_restart_continues_batches_and_ends_expired_ones(
    serve: Callable[..., Any], rank: FakeRank, tmp_path: Path
) -> None:
    with serve(batch=SMALL) as api:
        first = start(api.openai, *[line(f"a{i}") for i in range(3)])
        assert ended(api.openai, first).status == "completed"
        rank.hold_after = 0
        second, third = (start(api.openai, *[line(f"{i}") for i in range(5)]) for _ in range(2))
        wait_until(lambda: rank.submits.qsize() == 5, "not sent", TIMEOUT_S, 0.02)
    path = tmp_path / "batches" / "batches" / f"{third}.json"
    path.write_text(re.sub(r'"expires_at":\d+', '"expires_at":1', path.read_text()))
    rank.hold_after = None
    with serve(batch=SMALL) as api:
        assert ended(api.openai, first).output_file_id
        found = ended(api.openai, second)
        assert found.status == "completed"
        assert len(results(api.openai, found.output_file_id)) == 5
        found = ended(api.openai, third)
        assert found.status == "expired"
        errors = results(api.openai, found.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert len(errors) == 5


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_failed_storage_is_named_and_leaves_nothing(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    assert api.batches
    store = api.batches._store

    def fail(path: str, body: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "is_local", not remote)
    monkeypatch.setattr(store._fs, "pipe_file", fail)
    monkeypatch.setattr("cluster.batch.lines.os.fsync", lambda file: fail("", b""))
    parts: Any = [FILE, ("purpose", (None, b"batch"))]
    response = api.http.post("/v1/files", files=parts)
    refused(response, 507, None, "batch.storage=", "No space left")
    monkeypatch.undo()
    left = [path.name for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert left == [".lock"]


def test_batches_on_another_filesystem(
    folder: Path, rank: FakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is not local, and an empty folder does not exist, as in an object store."""
    monkeypatch.setattr(MemoryFileSystem, "makedirs", lambda *_, **__: None)
    with serve_api(folder, [rank], storage=tmp_path, storage_url="memory://batches") as api:
        batch = ended(api.openai, start(api.openai, line("a")))
        assert set(results(api.openai, batch.output_file_id)) == {"a"}
        assert batch.input_file_id in {each.id for each in api.openai.files.list().data}
        monkeypatch.setattr(MemoryFileSystem, "cat_file", None)  # the storage fails
        response = api.http.get(f"/v1/files/{batch.output_file_id}/content")
        refused(response, 507, None, "batch.storage=memory://")
