"""Mutated valid bodies against the API, and planted faults against the fuzzer's oracle."""

import asyncio
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from starlette.types import ASGIApp

from benchmarks.robustness.fuzz import __main__ as fuzz
from benchmarks.robustness.fuzz.in_process import (
    KEY,
    OPERATOR_KEY,
    InProcess,
    StubBackend,
    fuzzed_app,
)
from benchmarks.robustness.fuzz.mutations import AGAIN, Raw, encode
from benchmarks.robustness.fuzz.oracle import LIMIT_S, Answer, Oracle
from benchmarks.robustness.fuzz.requests import FuzzRequest, RequestGenerator
from contracts.config import BUNDLED

REQUESTS = 2000
SEED = 20
REQUEST = FuzzRequest(1, "POST", "/v1/score", "", [], b"{}")


class FuzzedApp:
    """An application with its document and the loop that calls it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.backend = fuzzed_app()
        self.loop = loop
        got = self.send(FuzzRequest(-1, "GET", "/openapi.json", "", [], b""))
        self.document = msgspec.json.decode(got.body)
        self.oracle = Oracle(self.document)
        self.generator = self.make_generator(SEED)

    def make_generator(self, seed: int) -> RequestGenerator:
        return RequestGenerator(seed, self.document, BUNDLED, KEY, OPERATOR_KEY)

    def send(self, request: FuzzRequest) -> Answer:
        return self.loop.run_until_complete(InProcess(self.app).send(request))

    def run(self, app: ASGIApp, numbers: range) -> fuzz.FuzzRun:
        run = fuzz.FuzzRun(InProcess(app), self.generator, self.oracle, [psutil.Process()])
        self.loop.run_until_complete(run.run(numbers))
        return run


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[FuzzedApp]:
    loop = asyncio.new_event_loop()
    yield FuzzedApp(loop)
    loop.close()


@pytest.mark.long
def test_mutated_bodies_are_answered_as_documented(fuzzed: FuzzedApp) -> None:
    run = fuzzed.run(fuzzed.app, range(REQUESTS))
    assert not run.failures, run.failures[0]
    assert run.statuses.total() == REQUESTS
    assert {200, 400, 401, 404, 405, 413, 415} <= run.statuses.keys()
    assert run.statuses[200] > REQUESTS // 10  # else only the decoder is tested
    assert fuzzed.backend.open_requests == 0


def test_request_is_determined_by_seed_and_number(fuzzed: FuzzedApp) -> None:
    again = fuzzed.make_generator(SEED)
    assert [fuzzed.generator.request(number) for number in range(50)] == [
        again.request(number) for number in range(50)
    ]
    assert fuzzed.make_generator(SEED + 1).request(7) != fuzzed.generator.request(7)


def test_planted_application_fault_is_found(fuzzed: FuzzedApp) -> None:
    async def fails(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("planted")

    assert any("planted" in failure for failure in fuzzed.run(fails, range(3)).failures)

    class Forgetful(StubBackend):
        sent = 0

        async def score(self, submit: object, **more: object) -> object:  # type: ignore[override]
            Forgetful.sent += 1
            scored = await super().score(submit)  # type: ignore[arg-type]
            if scored.candidate_logits is None or scored.candidate_logprobs is None:
                return scored
            logprobs = [value - Forgetful.sent for value in scored.candidate_logprobs]
            return msgspec.structs.replace(scored, candidate_logprobs=logprobs)

    run = fuzzed.run(fuzzed_app(Forgetful())[0], range(3))
    assert any("changed its answer" in failure for failure in run.failures)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(500, {}, b"{}", 0.0), "status 500"),
        (Answer(0, {}, b"", 0.0), "status 0"),
        (Answer(200, {"content-type": "application/json"}, b"{}", LIMIT_S + 1), "took"),
        (Answer(200, {"content-type": "application/json"}, b'{"scores": [1]}', 0.0), "documented"),
        (Answer(200, {"content-type": "text/html"}, b"", 0.0), "content-type"),
        (Answer(400, {}, b'{"detail": "no"}', 0.0), "not as documented"),
        (Answer(400, {}, b"no", 0.0), "not as documented"),
        (Answer(418, {}, b"", 0.0), "not as documented"),
    ],
)
def test_oracle_rejects_wrong_answer(fuzzed: FuzzedApp, answer: Answer, reason: str) -> None:
    assert reason in (Oracle(fuzzed.document).problem(REQUEST, answer) or "")


def test_encode_writes_repeated_keys_raw_text_and_surrogates() -> None:
    value = {"a": 1, f"a{AGAIN}": Raw("NaN"), "b": ["\ud800", None, True]}
    assert encode(value) == b'{"a": 1, "a": NaN, "b": ["\\ud800", null, true]}'
    assert encode(value, escape=False)[-20:] == b'["\xed\xa0\x80", null, true]}'
