"""Requests, numbered: each follows from the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.robustness.fuzz.bodies import Documented
from benchmarks.robustness.fuzz.mutations import Mutator
from benchmarks.robustness.fuzz.trees import text_of

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
OPERATED = ("/scale",)  # what the operator's key is for
GETS = ["/health", "/v1/models", "/openapi.json", "/v1/models/bundled"]


class Made(msgspec.Struct, frozen=True):
    """One request. pieces: into how many the body is cut on its way, in process. wire: the odd way
    in which it is sent over a connection (`wire.WIRES`)."""

    number: int
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    pieces: int = 1
    wire: str = ""


class Maker:
    """Makes the requests of a seed for a server that tells `document`. key: an API key of it.
    operator_key: of whoever may change it; None: what changes it is not asked for."""

    def __init__(
        self,
        seed: int,
        document: dict[str, Any],
        model: str,
        key: str | None,
        operator_key: str | None = None,
    ) -> None:
        documented = Documented(document)
        self.routes = [one for one in documented.routes if operator_key or one not in OPERATED]
        self.seed = seed
        self.after: Callable[[Made, int], Made] = lambda made, seed: made  # what else is changed
        self._key, self._operator_key = key, operator_key
        self._trees = {path: documented.valid_bodies(path, model) for path in self.routes}
        others = [tree for trees in self._trees.values() for tree in trees]
        self._mutators = {path: Mutator(documented, path, others) for path in self.routes}

    def made(self, number: int) -> Made:
        return self.after(self._made(number), self.seed)

    def _made(self, number: int) -> Made:
        dice = random.Random(f"{self.seed}/{number}")
        path = dice.choice(self.routes)
        tree = dice.choice(self._trees[path])
        request = Made(
            number=number,
            method="POST",
            path=path,
            query="",
            headers=self._headers(JSON, self._key_of(path)),
            body=self._mutators[path].mutated(tree, dice),
            pieces=dice.choice((1, 1, 1, 2, 5)),
        )
        return self._around(request, dice) if dice.random() < 0.06 else request

    def _key_of(self, path: str) -> str | None:
        return self._operator_key if path in OPERATED else self._key

    def _headers(self, content_type: str, key: str | None) -> list[tuple[str, str]]:
        bearer = [("authorization", f"Bearer {key}")] if key else []
        return [("content-type", content_type), *bearer]

    def _around(self, request: Made, dice: random.Random) -> Made:
        """Something else than the body is changed too."""
        keyed = self._headers(JSON, self._key)
        changes: list[dict[str, Any]] = [
            {"method": dice.choice(METHODS)},
            {"headers": self._headers(dice.choice(CONTENT_TYPES), self._key)},
            {"headers": [*keyed, ("content-encoding", dice.choice(ENCODINGS))]},
            {"headers": keyed[1:]},
            {"query": dice.choice(QUERIES)},
            {"path": dice.choice(OTHER_PATHS)},
            {"path": dice.choice(GETS), "method": dice.choice(("GET", "GET", "HEAD", "POST"))},
        ]
        if self._key:
            wrong = ("", "Bearer", "Bearer ", "Basic x", f"bearer  {self._key} ", "Bearer é", "x")
            changes.append(
                {"headers": [("content-type", JSON), ("authorization", dice.choice(wrong))]}
            )
        return msgspec.structs.replace(request, **dice.choice(changes))

    def honest(self, path: str) -> list[Made]:
        """The bodies that mutations start from, as they are (the probes: `oracle.Probes`)."""
        headers = self._headers(JSON, self._key_of(path))
        return [Made(-1, "POST", path, "", headers, text_of(tree)) for tree in self._trees[path]]
