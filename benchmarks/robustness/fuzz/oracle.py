"""What every answer must be: no 5xx, JSON of the documented shape, within LIMIT_S."""

from typing import Any

import jsonschema
import msgspec

from benchmarks.robustness.fuzz.requests import FuzzRequest
from cluster.http.response_types import ErrorResponse

LIMIT_S = 5.0
VALIDATION_INTERVAL = 10  # of the 200s: a validation takes a millisecond
VARYING = {"id", "created", "prompt_tokens_details"}  # fields that differ between equal requests
REWORDED = {"another line", "flipped", "noise"}  # wire.MALFORMED: another request


class Answer(msgspec.Struct):
    """status: 0 if the connection ended without one. fault: the text of an exception."""

    status: int
    headers: dict[str, str]
    body: bytes
    duration_s: float
    fault: str = ""


class Oracle:
    """Judges answers by an OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths: dict[str, Any] = document["paths"]
        self._components = {"components": document["components"]}
        self._validators: dict[str, jsonschema.protocols.Validator] = {}
        self._seen = 0

    def problem(self, request: FuzzRequest, answer: Answer) -> str | None:
        """Return what is wrong with the answer."""
        if answer.fault:
            return answer.fault
        if answer.duration_s > LIMIT_S:
            return f"took {answer.duration_s:.1f} s, over {LIMIT_S:g} s"
        if not 200 <= answer.status < 500:
            return f"status {answer.status}"
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if request.method == "HEAD" or (request.wire and not is_json):
            return None
        operation = None if request.wire in REWORDED else self._paths.get(request.path, {})
        operation = (operation or {}).get(request.method.lower())
        try:
            if answer.status >= 400:
                return _error_problem(operation, answer)
            return self._success_problem(operation, answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"status {answer.status}, body not as documented: {error}"

    def _success_problem(self, operation: dict[str, Any] | None, answer: Answer) -> str | None:
        if answer.status != 200 or operation is None:
            return None
        self._seen += 1
        if self._seen > VALIDATION_INTERVAL * 10 and self._seen % VALIDATION_INTERVAL:
            return None
        content = operation["responses"]["200"]["content"]
        media_type = answer.headers.get("content-type", "").partition(";")[0]
        if media_type not in content:
            return f"content-type {media_type} is not documented"
        if media_type == "text/event-stream":
            if not answer.body.endswith(b"data: [DONE]\n\n"):
                return f"the stream does not end with [DONE]: {answer.body[-100:]!r}"
            schema = content[media_type]["x-event-data"]
            problems = (self._mismatch(schema, event) for event in events(answer.body))
            return next(filter(None, problems), None)
        if media_type != "application/json":
            return None
        return self._mismatch(content[media_type]["schema"], msgspec.json.decode(answer.body))

    def _mismatch(self, schema: dict[str, Any], value: Any) -> str | None:
        key = str(schema)
        if key not in self._validators:
            full = {**schema, **self._components}
            self._validators[key] = jsonschema.Draft202012Validator(full)
        error = next(iter(self._validators[key].iter_errors(value)), None)
        return f"not as documented: {error.message[:300]}" if error else None


def _error_problem(operation: dict[str, Any] | None, answer: Answer) -> str | None:
    error = msgspec.json.decode(answer.body, type=ErrorResponse).error
    if not error.message or "\n" in error.message:
        return f"the message is not one line: {error.message[:200]!r}"
    if answer.status == 429:
        return "429 without other clients"
    if operation is not None and str(answer.status) not in operation["responses"]:
        return f"status {answer.status} is not documented"
    return None


def events(body: bytes) -> list[Any]:
    """Decode the events of a stream, without the last, [DONE]."""
    parts = body.decode().split("\n\n")[:-2]
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in parts]


def invariant(body: bytes) -> Any:
    """Return a JSON answer, or events, without the fields that vary."""
    return _invariant(events(body) if body.startswith(b"data: ") else msgspec.json.decode(body))


def _invariant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _invariant(item) for key, item in value.items() if key not in VARYING}
    return [_invariant(item) for item in value] if isinstance(value, list) else value
