"""Requests generated from the OpenAPI document are answered as documented.

About 200 requests by default, over 2,000 with `-m slow`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.robustness.fuzz.in_process import scaled
from cluster.http.openapi import openapi_document
from cluster.http.schemas import ModelInfo
from contracts.config import HttpConfig
from contracts.traces import TraceInfo, TraceResponse
from tests.support.api_harness import Api, serve_api
from tests.support.api_properties import Fuzzed
from tests.support.fake_rank import FakeRank
from tests.support.tiny_tokenizer import CHATML, write_byte_level

ROUTES: dict[str, dict[str, object]] = openapi_document(
    ModelInfo(name="any", max_context_tokens=64, vocab_size=64, eos_token_ids=()), HttpConfig()
)["paths"]  # includes new routes
POSTS = tuple(path for path, does in ROUTES.items() if "post" in does and "{" not in path)
GETS = tuple(path for path, does in ROUTES.items() if "get" in does and "{" not in path)
KINDS = ("valid", "full", "invalid")
FEW, MANY = 8, 175  # per kind and route


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = CHATML.replace("message['content']", "(message['content'] or '')")
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template=template)


async def _no_spans(seconds: float) -> TraceResponse:
    return TraceResponse(note=TraceInfo(seconds=seconds))


@pytest.fixture(scope="module")
def api(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    http = HttpConfig(max_batch_items=64)
    storage = tmp_path_factory.mktemp("batches")
    with serve_api(folder, None, http, trace=_no_spans, scale=scaled, storage=storage) as api:
        yield api


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", POSTS)
def test_generated_requests_are_answered_as_documented(api: Api, path: str, kind: str) -> None:
    Fuzzed(api).run(path, "POST", kind, FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", POSTS)
def test_many_generated_requests_are_answered_as_documented(api: Api, path: str, kind: str) -> None:
    fuzzed = Fuzzed(api, vary=True)
    fuzzed.run(path, "POST", kind, MANY)
    print(path, kind, sorted(fuzzed.statuses.items()))  # noqa: T201


@pytest.mark.parametrize("path", GETS)
def test_plain_routes_answer_as_documented(api: Api, path: str) -> None:
    Fuzzed(api).run(path, "GET", "valid", 1)


def test_generated_model_names_are_answered_as_documented(api: Api) -> None:
    Fuzzed(api).run("/v1/models/{name}", "GET", "valid", 10)


@pytest.mark.long
def test_requests_before_ready_get_documented_503(folder: Path) -> None:
    rank = FakeRank("attention-0", lambda submit: [60])
    with serve_api(folder, [rank], no_rank_timeout_s=0.05) as api:
        rank.healthy = False
        api.wait_for(lambda: bool(api.backend.problems()))
        fuzzed = Fuzzed(api)
        for path in POSTS:
            if path.startswith("/v1/"):  # the others use no rank
                fuzzed.run(path, "POST", "valid", 3)
        fuzzed.run("/health", "GET", "valid", 1)
        assert 503 in fuzzed.statuses
        assert 200 not in fuzzed.statuses
