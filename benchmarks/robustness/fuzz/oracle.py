"""What every answer must be: never a 5xx, JSON of the documented shape, in time."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec

from benchmarks.robustness.fuzz.requests import Made
from cluster.http.response_types import ErrorResponse

LIMIT_S = 5.0
VALIDATED = 10  # every one of so many 200s is held against the document: that takes a millisecond
VARYING = {"id", "created"}
REWORDED = {"another line", "flipped", "noise"}  # ways (wire.py) to ask for something else, perhaps


class Answer(msgspec.Struct):
    """status 0: the connection ended without one. fault: what an exception said."""

    status: int
    headers: dict[str, str]
    body: bytes
    duration_s: float
    fault: str = ""


class Oracle:
    """Says what is wrong with an answer."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths: dict[str, Any] = document["paths"]
        self._components = {"components": document["components"]}
        self._validators: dict[str, jsonschema.protocols.Validator] = {}
        self._seen = 0

    def verdict(self, request: Made, answer: Answer) -> str | None:
        """None if the answer is as it should be."""
        if answer.fault:
            return answer.fault
        if answer.duration_s > LIMIT_S:
            return f"took {answer.duration_s:.1f} s, over {LIMIT_S:g} s"
        if answer.status >= 500 or not answer.status >= 200:
            return f"status {answer.status}"
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if request.method == "HEAD" or (request.wire and not is_json):
            return None  # what is no HTTP is answered as it can be
        try:
            return self._of_error(request, answer) or self._of_success(request, answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return f"status {answer.status}, and its body is not as documented: {error}"

    def _of_error(self, request: Made, answer: Answer) -> str | None:
        if answer.status < 400:
            return None
        error = msgspec.json.decode(answer.body, type=ErrorResponse).error
        if not error.message or "\n" in error.message:
            return f"the message is not one line: {error.message[:200]!r}"
        if answer.status == 429:
            return "429, though nobody else asks"
        operation = self._operation(request)
        if operation is not None and str(answer.status) not in operation["responses"]:
            return f"status {answer.status} is not documented"
        return None

    def _of_success(self, request: Made, answer: Answer) -> str | None:
        operation = self._operation(request)
        if answer.status != 200 or operation is None:
            return None
        self._seen += 1
        if self._seen > VALIDATED * 10 and self._seen % VALIDATED:
            return None
        content = operation["responses"]["200"]["content"]
        media_type = answer.headers.get("content-type", "").partition(";")[0]
        if media_type not in content:
            return f"content-type {media_type} is not documented"
        if media_type == "text/event-stream":
            return self._of_events(content[media_type]["x-event-data"], answer.body)
        if media_type != "application/json":
            return None
        return self._against(content[media_type]["schema"], msgspec.json.decode(answer.body))

    def _of_events(self, schema: dict[str, Any], body: bytes) -> str | None:
        events = body.decode().split("\n\n")
        if events[-2:] != ["data: [DONE]", ""]:
            return f"the stream does not end with [DONE]: {body[-100:]!r}"
        for event in events[:-2]:
            value = msgspec.json.decode(event.removeprefix("data: "))
            if problem := self._against(schema, value):
                return problem
        return None

    def _against(self, schema: dict[str, Any], value: Any) -> str | None:
        key = str(schema)
        if key not in self._validators:
            full = {**schema, **self._components}
            self._validators[key] = jsonschema.Draft202012Validator(full)
        error = next(iter(self._validators[key].iter_errors(value)), None)
        return f"not as documented: {error.message[:300]}" if error else None

    def _operation(self, request: Made) -> dict[str, Any] | None:
        if request.wire in REWORDED:
            return None
        operations: dict[str, Any] = self._paths.get(request.path, {})
        return operations.get(request.method.lower())


def lasting(body: bytes) -> Any:
    """A JSON answer, or events, without what differs between two answers to the same request."""
    if body.startswith(b"data: "):
        events = body.decode().split("\n\n")[:-2]
        return [_lasting(msgspec.json.decode(event.removeprefix("data: "))) for event in events]
    return _lasting(msgspec.json.decode(body))


def _lasting(value: Any) -> Any:
    """Cached tokens too depend on who asked before."""
    if isinstance(value, dict):
        return {
            key: _lasting(item)
            for key, item in value.items()
            if key not in VARYING and key != "prompt_tokens_details"
        }
    return [_lasting(item) for item in value] if isinstance(value, list) else value
