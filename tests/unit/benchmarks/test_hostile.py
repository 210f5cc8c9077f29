"""Hostile clients of the robustness harness against the real API before a fake rank."""

import random
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest

from benchmarks.robustness import hostile
from benchmarks.robustness.fuzz.requests import RequestGenerator
from benchmarks.robustness.hostile import HostileTraffic
from benchmarks.robustness.memory import MemorySample, growth_fraction
from contracts.config import HttpConfig
from tests.support.api_harness import MODEL, Api, serve_api
from tests.support.tiny_tokenizer import CHATML, write_byte_level

VISITS = 6
KINDS = [kind.name for kind in HostileTraffic(("", 0), None, [1], []).kinds(1.0)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = write_byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template=CHATML)
    with serve_api(folder, None, HttpConfig(max_body_bytes=1 << 20)) as api:
        yield api


@pytest.fixture
def traffic(api: Api, monkeypatch: pytest.MonkeyPatch) -> HostileTraffic:
    monkeypatch.setattr(hostile, "BUNDLED", MODEL)
    for name in ("IDLE_S", "READ_S", "UNREAD_S", "STRANGER_S"):
        monkeypatch.setattr(hostile, name, 0.05)
    monkeypatch.setattr(hostile, "BYTE_EVERY_S", 0.0)
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    document = msgspec.json.decode(api.http.get("/openapi.json").content)
    generator = RequestGenerator(1, document, MODEL, None)
    return HostileTraffic((parts.hostname, parts.port), generator, [parts.port], [])


@pytest.mark.parametrize("name", KINDS)
def test_clients_of_each_kind_get_no_server_error(
    api: Api, traffic: HostileTraffic, name: str
) -> None:
    (kind,) = (kind for kind in traffic.kinds(1.0) if kind.name == name)
    for number in range(VISITS):
        outcome = api.loop.run(kind.visit(random.Random(f"{name} {number}")))
        assert not outcome.startswith("!"), outcome
    assert api.http.get("/health").status_code == 200


def test_server_error_is_a_failure(api: Api, traffic: HostileTraffic) -> None:
    api.rank.fail_with = ("planted", "internal_error", 500)
    try:
        outcomes = [api.loop.run(traffic.bad(random.Random(number))) for number in range(40)]
        assert any(outcome.startswith("!status 500") for outcome in outcomes)
    finally:
        api.rank.fail_with = None


def samples(*sizes: int, every_s: float = 60.0) -> list[MemorySample]:
    return [MemorySample(n * every_s, size) for n, size in enumerate(sizes)]


def test_memory_that_grows_only_during_warm_up_is_flat() -> None:
    warm = [200 + 10 * minute for minute in range(10)]
    assert growth_fraction(samples(*warm, *[300] * 51), 3600.0) == 0.0


def test_memory_that_keeps_growing_is_measured() -> None:
    grown = growth_fraction(samples(*[300 + minute for minute in range(61)]), 3600.0)
    assert grown is not None
    assert grown > 0.14


def test_short_run_is_not_judged() -> None:
    assert growth_fraction(samples(100, 200, 300), 180.0) is None
