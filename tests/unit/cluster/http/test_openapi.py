"""The OpenAPI document is valid and lists all routes, errors and bounds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from starlette.routing import Route

import cluster.http.errors
import contracts.errors
from cluster.http import openapi
from cluster.http.openapi import openapi_document
from cluster.http.schemas import ModelInfo
from contracts.config import HttpConfig, LimitsConfig
from contracts.errors import ClientGoneError, RequestError, TandemError
from tests.support.api_harness import CONTEXT_TOKENS, MODEL, Api, serve_api

SERVED = ModelInfo(name=MODEL, max_context_tokens=256, vocab_size=420, eos_token_ids=(2,))
HTTP = HttpConfig(max_batch_items=64)


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    http = HttpConfig(api_keys=["k"], max_batch_items=64)
    with serve_api(folder, None, http) as api:
        yield api


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_document_is_valid_openapi(keys: list[str]) -> None:
    document = openapi_document(SERVED, HttpConfig(api_keys=list(keys)))
    schemathesis.openapi.from_dict(json.loads(json.dumps(document))).validate()


def test_document_lists_exactly_the_routes(api: Api) -> None:
    document = openapi_document(SERVED, HTTP)
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in api.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert described == served


def test_document_needs_no_key_and_html_pages_are_off(api: Api) -> None:
    response = api.http.get("/openapi.json")
    assert response.status_code == 200
    document = response.json()
    assert document["openapi"] == "3.1.0"
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert prompt["anyOf"][1]["maxItems"] == 64
    assert prompt["anyOf"][2]["maxItems"] == CONTEXT_TOKENS
    characters = CONTEXT_TOKENS * api.tokenizer.longest_token_characters
    assert prompt["anyOf"][0]["maxLength"] == characters
    limits = document["info"]["x-limits"]
    assert limits["prompt_characters"] == characters
    assert limits["pass_tokens"] == LimitsConfig().pass_tokens
    for path in ("/docs", "/redoc"):
        assert api.http.get(path).status_code == 404


def test_required_keys_are_documented() -> None:
    document = openapi_document(SERVED, HttpConfig(api_keys=["k"]))
    needing = {
        path for path, item in document["paths"].items() for op in item.values() if "security" in op
    }
    others = {"/tokenize", "/detokenize"}
    assert needing == {path for path in document["paths"] if path.startswith("/v1/")} | others
    without = json.dumps(openapi_document(SERVED, HTTP)["paths"])
    assert "Error401" not in without


def test_every_error_code_is_documented() -> None:
    known = {error.code for error in openapi.ERRORS}
    described = openapi_document(SERVED, HTTP)["components"]["responses"]
    for module in (contracts.errors, cluster.http.errors):
        for error in vars(module).values():
            if isinstance(error, type) and issubclass(error, RequestError):
                assert error.code in known
    for error in openapi.ERRORS:
        schema = described[f"Error{error.status}"]["content"]["application/json"]["schema"]
        assert error.code in schema["allOf"][1]["properties"]["error"]["properties"]["code"]["enum"]
    assert ClientGoneError not in openapi.ERRORS
    assert TandemError in openapi.ERRORS
