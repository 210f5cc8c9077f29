"""Requests generated from the OpenAPI document, and checks of their answers."""

import copy
import json
from typing import Any

import jsonschema
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, CheckFunction, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cluster.http.schemas import NEUTRAL
from tests.support.api_harness import TIMEOUT_S, Api

AnyCase = Case[Any]
CHUNKS = {"/v1/completions": "CompletionChunk", "/v1/chat/completions": "ChatCompletionChunk"}
CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
REJECTION = negative_data_rejection
MAX_EVENTS = 1_000_000  # reads whole streams
REFUSED = [400, 404, 413, 415]
CONFIG = SchemathesisConfig.from_dict(
    {
        "max-stream-events": MAX_EVENTS,
        "checks": {"negative_data_rejection": {"expected-statuses": REFUSED}},
    }
)


class Fuzzed:
    """Generates requests and counts statuses.

    document: the server's own.
    vary: other requests in each run.
    """

    def __init__(self, api: Api, *, vary: bool = False) -> None:
        self.api = api
        self.vary = vary
        self.document: dict[str, Any] = api.http.get("/openapi.json").json()
        self.statuses: dict[int, int] = {}

    def run(self, path: str, method: str, kind: str, cases: int) -> None:
        """Send `cases` generated requests and check the answers; a valid one after each.

        kind: "valid"; "full": valid with all effective fields; "invalid".
        """
        document = _with_all_fields(self.document) if kind == "full" else self.document
        operation = schemathesis.openapi.from_dict(document, config=CONFIG)[path][method]
        mode = GenerationMode.NEGATIVE if kind == "invalid" else GenerationMode.POSITIVE

        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=not self.vary,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: AnyCase) -> None:
            if kind != "invalid":
                case.body = _usable(_with_integers(case.body))
            self._check(path, case, CHECKS if kind != "invalid" else [*CHECKS, REJECTION])

        check()

    def _check(self, path: str, case: AnyCase, checks: list[CheckFunction]) -> None:
        response = case.call(base_url=self.api.url, timeout=TIMEOUT_S)
        status = response.status_code
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if self.api.rank.healthy:
            case.validate_response(response, checks=[not_a_server_error, *checks])
            assert self.api.post("/v1/completions", prompt="a").status_code == 200
        else:
            case.validate_response(response, checks=checks)
            assert status < 500 or response.json()["error"]["code"] == "not_ready"
        if response.headers["content-type"][0].startswith("text/event-stream"):
            self._check_events(path, response.content.decode())

    def _check_events(self, path: str, text: str) -> None:
        events = text.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        schema = {**self.document, "$ref": f"#/components/schemas/{CHUNKS[path]}"}
        validator = jsonschema.Draft202012Validator(schema)
        for event in events:
            validator.validate(json.loads(event.removeprefix("data: ")))


def _with_all_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` with all effective fields required."""
    document = copy.deepcopy(document)
    for name in ("CompletionBody", "ChatBody", "ClassifyBody", "ScoreBody"):
        body = document["components"]["schemas"][name]
        for field in {*NEUTRAL, "best_of", "echo" if name == "ChatBody" else ""}:
            body["properties"].pop(field, None)
        body["required"] = sorted(body["properties"])
        body["additionalProperties"] = False
    return document


def _usable(body: Any) -> Any:
    """Return `body` without fields that require another one."""
    if isinstance(body, dict):
        if not body.get("stream"):
            body.pop("stream_options", None)
        if body.get("logprobs") in (None, False):
            body.pop("top_logprobs", None)
    return body


def _with_integers(body: Any) -> Any:
    """Return `body` with 1 for 1.0, which JSON Schema accepts as an integer and the API rejects."""
    if isinstance(body, dict):
        return {name: _with_integers(value) for name, value in body.items()}
    if isinstance(body, list):
        return [_with_integers(value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body
