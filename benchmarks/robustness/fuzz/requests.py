"""Numbered requests: the seed and the number determine each of them."""

import random
from typing import Any

import msgspec

from benchmarks.robustness.fuzz.bodies import BODIES
from benchmarks.robustness.fuzz.mutations import Mutator

JSON = "application/json"
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "POST"]
CONTENT_TYPES = [
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json", "*/*"),
    *("application/json; charset=utf-16", "APPLICATION/JSON", "application/json;", "a" * 3000),
]
ENCODINGS = ["gzip", "br", "deflate", "identity", "x", "gzip, gzip"]
QUERIES = ["a=b", "stream=true", "=", "&&&", "%00", "%ff", "a" * 2000, "model=x&model=y", "%"]
OTHER_PATHS = [
    *("/", "/v1", "/v1/", "/v1/completions/", "/v1//completions", "/V1/completions", "/health/x"),
    *("/v1/models/%00", "/v1/models/a%2fb", "/v1/models/" + "a" * 2000, "/v1/%2e%2e/x", "/docs"),
    *("/v1/models/%ff%fe", "/v1/models/", "/v1/embeddings", "/../etc/passwd", "/v1/models/é"),
]
OPERATOR_ROUTES = ("/scale",)
STORED_ROUTES = ("/v1/batches",)  # need an uploaded file
GETS = ["/health", "/v1/models", "/openapi.json", "/v1/models/bundled"]


class FuzzRequest(msgspec.Struct, frozen=True):
    """pieces: number of parts in which the body arrives, in process. wire: how it is malformed on
    a connection (a key of `wire.MALFORMED`)."""

    number: int
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    pieces: int = 1
    wire: str = ""


class RequestGenerator:
    """Requests for the POST routes of an OpenAPI document. Without operator_key, routes that need
    it are left out. Raises KeyError for a route that `BODIES` lacks."""

    def __init__(
        self,
        seed: int,
        document: dict[str, Any],
        model: str,
        key: str | None,
        operator_key: str | None = None,
    ) -> None:
        self.seed, self._key, self._operator_key = seed, key, operator_key
        fields = {
            path: _fields(document, operations["post"])
            for path, operations in document["paths"].items()
            if JSON in operations.get("post", {}).get("requestBody", {}).get("content", {})
            and path not in STORED_ROUTES
            and (operator_key or path not in OPERATOR_ROUTES)
        }
        self.routes = list(fields)
        self._bodies = {
            path: [{"model": model, **body} if "model" in names else body for body in BODIES[path]]
            for path, names in fields.items()
        }
        others = [body for bodies in self._bodies.values() for body in bodies]
        self._mutators = {path: Mutator(names, others) for path, names in fields.items()}

    def request(self, number: int) -> FuzzRequest:
        """Return the mutated request of this number."""
        dice = random.Random(f"{self.seed}/{number}")
        path = dice.choice(self.routes)
        body = self._mutators[path].mutate(dice.choice(self._bodies[path]), dice)
        headers, pieces = self._headers(path), dice.choice((1, 1, 1, 2, 5))
        request = FuzzRequest(number, "POST", path, "", headers, body, pieces)
        return self._beside_body(request, dice) if dice.random() < 0.06 else request

    def valid_requests(self, path: str) -> list[FuzzRequest]:
        """Return the unchanged requests of a route."""
        return [
            FuzzRequest(-1, "POST", path, "", self._headers(path), msgspec.json.encode(body))
            for body in self._bodies[path]
        ]

    def _headers(self, path: str, content_type: str = JSON) -> list[tuple[str, str]]:
        key = self._operator_key if path in OPERATOR_ROUTES else self._key
        bearer = [("authorization", f"Bearer {key}")] if key else []
        return [("content-type", content_type), *bearer]

    def _beside_body(self, request: FuzzRequest, dice: random.Random) -> FuzzRequest:
        """Change the method, a header, the query or the path."""
        headers = self._headers("")
        changes: list[dict[str, Any]] = [
            {"method": dice.choice(METHODS)},
            {"headers": self._headers("", dice.choice(CONTENT_TYPES))},
            {"headers": [*headers, ("content-encoding", dice.choice(ENCODINGS))]},
            {"headers": headers[1:]},
            {"query": dice.choice(QUERIES)},
            {"path": dice.choice(OTHER_PATHS)},
            {"path": dice.choice(GETS), "method": dice.choice(("GET", "GET", "HEAD", "POST"))},
        ]
        if self._key:
            wrong = ("", "Bearer", "Bearer ", "Basic x", f"bearer  {self._key} ", "Bearer é", "x")
            changes.append({"headers": [headers[0], ("authorization", dice.choice(wrong))]})
        return msgspec.structs.replace(request, **dice.choice(changes))


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return sorted(schema["properties"])
