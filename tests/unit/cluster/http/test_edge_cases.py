"""Odd JSON, huge bodies, slow bodies and broken connections do not affect later requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.api_harness import MODEL, TIMEOUT_S, Api, serve_api
from tests.support.fake_rank import FakeRank

USER = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/classify": {"input": "a", "labels": ["yes", "no"]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [60]},
}
DEPTH = 100_000


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serve_api(folder, [FakeRank("attention-0", lambda submit: [60, 61])]) as api:
        yield api


@pytest.fixture(autouse=True)
def _the_next_good_request_is_served(api: Api) -> Iterator[None]:
    yield
    assert api.post("/v1/completions", prompt="a").status_code == 200


def post_raw(api: Api, route: str, data: Any, content_type: str = "application/json") -> Any:
    return api.http.post(route, content=data, headers={"Content-Type": content_type})


def with_field(route: str, name: str, value: str) -> bytes:
    """Return a valid body with one more field of raw JSON."""
    good = json.dumps({"model": MODEL, **GOOD[route]})
    return f'{good[:-1]}, "{name}": {value}}}'.encode("utf-8", "surrogatepass")


ANYWHERE = {
    "deep lists": "[" * DEPTH + "]" * DEPTH,
    "deep objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "a float beyond floats": "1e400",
    "a lone surrogate": '"\\ud83d"',
    "a lone surrogate as bytes": '"\ud800"',
    "half of a pair, reversed": '"\\udc00\\ud800"',
    "a raw NUL": '"\0"',
    "a cut escape": '"\\u12"',
    "a trailing comma": "[1,]",
    "a comment": "1 /* one */",
}


@pytest.mark.parametrize("name", ["user", "model", "priority"])
@pytest.mark.parametrize("kind", ANYWHERE)
@pytest.mark.parametrize("route", GOOD)
def test_invalid_json_in_ignored_field_is_400(api: Api, route: str, kind: str, name: str) -> None:
    response = post_raw(api, route, with_field(route, name, ANYWHERE[kind]))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", [2**70, -(2**70), 10**400], ids=["2^70", "-2^70", "10^400"])
@pytest.mark.parametrize(
    ("route", "name"),
    [
        *(("/v1/completions", name) for name in ("max_tokens", "n", "logprobs", "seed", "top_k")),
        *(("/v1/completions", name) for name in ("prompt", "best_of", "temperature", "top_p")),
        *(("/v1/chat/completions", name) for name in ("max_completion_tokens", "top_logprobs")),
        ("/v1/score", "label_token_ids"),
    ],
)
def test_huge_integer_gets_400_naming_field(api: Api, route: str, name: str, value: int) -> None:
    given = [value] if name in ("prompt", "label_token_ids") else value
    more = {"logprobs": True} if name == "top_logprobs" else {}
    response = api.post(route, **{**GOOD[route], **more, name: given})
    assert response.status_code == 400, response.text
    wanted = "max_tokens" if name == "max_completion_tokens" else name
    assert (response.json()["error"]["param"] or "").partition("[")[0] in (wanted, name, "")


@pytest.mark.parametrize("route", GOOD)
def test_last_of_repeated_keys_counts(api: Api, route: str) -> None:
    assert post_raw(api, route, with_field(route, "model", '"other"')).status_code == 404
    assert post_raw(api, route, with_field(route, "model", f'"{MODEL}"')).status_code == 200


def test_nul_characters_are_plain_text(api: Api) -> None:
    assert api.post("/v1/completions", prompt="\0").status_code == 200
    assert api.post("/v1/classify", input="\0", labels=["\0", "\0\0"]).status_code == 200
    assert api.post("/v1/completions", prompt="a", stop="\0").status_code == 200
    response = api.http.post("/v1/completions", json={"model": "ti\0ny", "prompt": "a"})
    assert response.status_code == 404


def test_labels_sharing_first_token_are_distinguished(api: Api) -> None:
    labels = ["positive one", "positive two", "positive"]
    row = api.post("/v1/classify", input="a", labels=labels).json()["data"][0]
    assert len(row["probs"]) == len(labels)
    assert sum(row["probs"]) == pytest.approx(1)
    repeated = api.post("/v1/classify", input="a", labels=[*labels, "positive one"])
    assert repeated.status_code == 400
    assert repeated.json()["error"]["param"] == "labels"


def connect(api: Api) -> socket.socket:
    address = urlsplit(api.url)
    return socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)


def head(data: bytes) -> bytes:
    lines = (
        *("POST /v1/completions HTTP/1.1", "Host: tandem", "Content-Type: application/json"),
        *(f"Content-Length: {len(data)}", "Connection: close"),
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def test_body_sent_byte_by_byte_is_answered(api: Api) -> None:
    data = with_field("/v1/completions", "user", '"slow"')
    with connect(api) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head(data) + data:
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [0, 10])
def test_disconnect_during_request_releases_connection(api: Api, sent: int) -> None:
    data = with_field("/v1/completions", "user", '"gone"')
    with connect(api) as connection:
        connection.sendall(head(data) + data[:sent])
