"""Mutated valid bodies against the API, and planted faults against the fuzzer's oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from starlette.types import ASGIApp

from benchmarks.robustness.fuzz.in_process import (
    KEY,
    OPERATOR_KEY,
    InProcess,
    fuzzed_app,
)
from benchmarks.robustness.fuzz.oracle import LIMIT_S, Answer, Oracle
from benchmarks.robustness.fuzz.requests import Made, Maker
from benchmarks.robustness.fuzz.run import Memory, Report, Run
from benchmarks.robustness.fuzz.stub_backend import StubBackend
from contracts.config import BUNDLED

REQUESTS = 2000
SEED = 20
GROWTH_BYTES = 256 << 20
REQUEST = Made(1, "POST", "/v1/score", "", [], b"{}")


class Fuzzed:
    """An application with its document and the loop that calls it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.app: ASGIApp
        self.backend: StubBackend
        self.app, self.backend = fuzzed_app()
        self.loop = loop
        got = self.send(Made(-1, "GET", "/openapi.json", "", [], b""))
        self.document = msgspec.json.decode(got.body)
        self.oracle = Oracle(self.document)
        self.maker = Maker(SEED, self.document, BUNDLED, KEY, OPERATOR_KEY)

    def send(self, request: Made) -> Answer:
        return self.loop.run_until_complete(InProcess(self.app).send(request))

    def run(self, app: ASGIApp, numbers: range) -> Report:
        memory = Memory([psutil.Process()], GROWTH_BYTES)
        run = Run(InProcess(app), self.maker, self.oracle, memory)
        return self.loop.run_until_complete(run.all(numbers, lambda: None))


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    loop = asyncio.new_event_loop()
    yield Fuzzed(loop)
    loop.close()


def test_mutated_bodies_are_answered_as_documented(fuzzed: Fuzzed) -> None:
    report = fuzzed.run(fuzzed.app, range(REQUESTS))
    assert not report.failures, report.failures[0]
    assert report.sent == REQUESTS
    assert {200, 400, 401, 404, 405, 413, 415} <= report.statuses.keys()
    assert report.statuses[200] > REQUESTS // 10  # else only the decoder is tested
    assert fuzzed.backend.under_way == 0


def test_request_is_determined_by_seed_and_number(fuzzed: Fuzzed) -> None:
    again = Maker(SEED, fuzzed.document, BUNDLED, KEY, OPERATOR_KEY)
    assert [fuzzed.maker.made(number) for number in range(50)] == [
        again.made(number) for number in range(50)
    ]
    other = Maker(SEED + 1, fuzzed.document, BUNDLED, KEY, OPERATOR_KEY)
    assert other.made(7) != fuzzed.maker.made(7)


def test_planted_application_fault_is_found(fuzzed: Fuzzed) -> None:
    """Planted: an exception, an answer of another shape, forgotten state."""

    async def fails(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("planted")

    report = fuzzed.run(fails, range(3))
    assert any("planted" in failure.reason for failure in report.failures)

    class Forgetful(StubBackend):
        sent = 0

        async def score(self, submit: object, **more: object) -> object:  # type: ignore[override]
            Forgetful.sent += 1
            scored = await super().score(submit)  # type: ignore[arg-type]
            if scored.candidate_logits is None or scored.candidate_logprobs is None:
                return scored
            logprobs = [value - Forgetful.sent for value in scored.candidate_logprobs]
            return msgspec.structs.replace(scored, candidate_logprobs=logprobs)

    report = fuzzed.run(fuzzed_app(Forgetful())[0], range(3))
    assert any("answered otherwise" in failure.reason for failure in report.failures)


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
def test_oracle_rejects_wrong_answer(fuzzed: Fuzzed, answer: Answer, reason: str) -> None:
    assert reason in (Oracle(fuzzed.document).verdict(REQUEST, answer) or "")
