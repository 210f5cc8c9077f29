"""HTTP server for the metrics of one process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from actors.telemetry import exporter
from actors.telemetry.exporter import MAX_CONNECTIONS, Exporter
from actors.telemetry.telemetry import Telemetry
from contracts import metrics

OPEN_METRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
DEADLINE_S = 20.0


class Exporting:
    """A process with metrics. address: "host:port/path"."""

    def __init__(self, key: str | None = None) -> None:
        self.telemetry = Telemetry()
        self.exporter = Exporter(self.telemetry, key=key, name="attention-0")
        self.address = self.exporter.open("127.0.0.1")

    def get(self, path: str | None = None, **headers: str) -> httpx.Response:
        where = self.address if path is None else self.address.partition("/")[0] + path
        return httpx.get(f"http://{where}", headers=headers, timeout=DEADLINE_S)

    def connect(self) -> socket.socket:
        host, _, port = self.address.partition("/")[0].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


@pytest.fixture
def exporting() -> Iterator[Exporting]:
    made = Exporting()
    yield made
    made.exporter.close()


def test_scrape_contains_all_metrics(exporting: Exporting) -> None:
    exporting.telemetry.count(metrics.PREEMPTIONS, by=3)
    answer = exporting.get()
    (family,) = text_string_to_metric_families(answer.text)
    assert [sample.value for sample in family.samples] == [3.0]
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert exporting.get("/metrics?name[]=tandem").text == answer.text


def test_openmetrics_is_served_on_request_with_an_exemplar_per_bucket(
    exporting: Exporting,
) -> None:
    for value, request_id in ((0.02, "req-a"), (0.2, "req-b" * 100)):
        labels = "generation", "ls"
        exporting.telemetry.observe(metrics.TTFT, *labels, value=value, request_id=request_id)
    answer = exporting.get(**OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    (family,) = open_metrics_families(answer.text)
    exemplars = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar is not None}
    assert [e.labels["request_id"][:5] for e in exemplars.values()] == ["req-a", "req-b"]
    assert [e.value for e in exemplars.values()] == [0.02, 0.2]
    assert "req-a" not in exporting.get().text


def test_path_of_another_process_is_not_found(exporting: Exporting) -> None:
    """A process may get a port that Prometheus still scrapes for another one."""
    other = Exporting()
    try:
        path = "/" + other.address.partition("/")[2]
        assert other.get(path).status_code == 200
        assert exporting.get(path).status_code == 404
    finally:
        other.exporter.close()
    with pytest.raises(httpx.ConnectError):
        other.get()


def test_request_without_the_bearer_token_is_unauthorized() -> None:
    guarded = Exporting(key="secret")
    try:
        guarded.telemetry.count(metrics.PREEMPTIONS)
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}):
            answer = guarded.get(**given)
            assert (answer.status_code, "tandem_" in answer.text) == (401, False)
        assert guarded.get(Authorization="Bearer secret").status_code == 200
        assert guarded.get(Authorization="bearer  secret").status_code == 200
    finally:
        guarded.exporter.close()


@pytest.mark.parametrize(
    "sent",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" + b"\0" * 64, b"a" * (1 << 17)],
    ids=["nothing", "no path", "TLS", "too long"],
)
def test_client_without_http_is_disconnected_and_others_are_served(
    exporting: Exporting, sent: bytes
) -> None:
    with exporting.connect() as strange:
        strange.sendall(sent)
        strange.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # what it has sent was not all read
            while strange.recv(1 << 16):
                pass
    assert exporting.get().status_code == 200


def test_delete_is_not_allowed(exporting: Exporting) -> None:
    host = exporting.address.partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    connection.request("DELETE", "/metrics")
    assert connection.getresponse().status == 405
    connection.close()


def test_slow_scrapers_are_disconnected_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch, exporting: Exporting
) -> None:
    monkeypatch.setattr(exporter, "DEADLINE_S", 0.2)
    slow = [exporting.connect() for _ in range(MAX_CONNECTIONS)]
    for connection in slow:
        connection.sendall(b"GET /metrics HT")
    assert exporting.get().status_code == 200
    for connection in slow:
        assert connection.recv(1) == b""
        connection.close()


def test_close_does_not_wait_for_slow_scrapers() -> None:
    exporting = Exporting()
    slow = [exporting.connect() for _ in range(MAX_CONNECTIONS + 1)]
    started_s = time.monotonic()
    exporting.exporter.close()
    assert time.monotonic() - started_s < exporter.READ_TIMEOUT_S
    for connection in slow:
        connection.close()


def test_scraper_that_does_not_read_does_not_block_others(exporting: Exporting) -> None:
    deaf = exporting.connect()
    deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert exporting.get().status_code == 200
    deaf.close()


def test_metrics_of_a_loop_are_collected_in_that_loop() -> None:
    async def scrape() -> tuple[str, list[int]]:
        telemetry, threads = Telemetry(), list[int]()

        def solve_s() -> float:
            threads.append(threading.get_ident())
            return 7.0

        telemetry.read(metrics.PLAN_SOLVE, of=solve_s)
        loop = asyncio.get_running_loop()
        exporter = Exporter(telemetry, key=None, name="ingress-1", loop=loop)
        address = exporter.open("127.0.0.1")
        answer = await asyncio.to_thread(httpx.get, f"http://{address}", timeout=DEADLINE_S)
        await asyncio.to_thread(exporter.close)
        return answer.text, threads

    text, threads = asyncio.run(scrape())
    assert "tandem_plan_solve_seconds 7.0" in text
    assert set(threads) == {threading.get_ident()}


def test_endless_scrapes_take_a_bounded_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(exporter, "sleep", pauses.append)
    ticks = itertools.count()
    monkeypatch.setattr(exporter, "monotonic_s", lambda: 0.01 * next(ticks))
    exporting = Exporting()
    try:
        for _ in range(3):
            assert exporting.get().status_code == 200
    finally:
        exporting.exporter.close()
    assert pauses == pytest.approx([0.0, 0.18, 0.18])  # a page of 0.01 s, then 19 times as long


def test_unavailable_port_is_logged_and_does_not_stop_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Exporter(Telemetry(), key=None, name="expert-1")
    with caplog.at_level(logging.WARNING, "tandem.metrics"):
        assert broken.open("192.0.2.1") == ""  # documentation address, on no machine
    broken.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("exporter_failed name=expert-1 host=192.0.2.1 reason=")
