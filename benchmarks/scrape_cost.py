"""What scrapes of 500 series cost a rank's loop: steps of a thread, alone and beside them.

    python -m benchmarks.scrape_cost

The loop multiplies a small matrix, observes a stage and does a little Python, as a decode step of a
small model does: the worst case, for what a scrape costs is the interpreter's lock. Variants in
turn: nobody scrapes, a Prometheus that does ten times a second (fifty times as often as the
configuration in dashboards/ says, or most rounds would have none), and 1000 scrapes a second, each
from a connection of its own; all from another process. What one scrape takes off the loop is the
time that rounds with ten a second lose, by scrape.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import select
import socket
import statistics
import time
from multiprocessing.synchronize import Event
from typing import Any

import torch

from actors.telemetry.exporter import ExporterThread
from actors.telemetry.telemetry import Telemetry
from benchmarks.harness import Result, write_result
from contracts import metrics

SERIES = 500
STEPS = 16_000  # of a round: about a second
ROUNDS = 24
EXPOSITIONS = 200
VARIANTS = {"alone": 0.0, "scraped": 10.0, "storm": 1000.0}  # scrapes a second
MOST_WAITING = 64
PAUSE_S = 0.3
READY_S = 120.0
SOCKET_S = 10.0


def filled() -> Telemetry:
    """As many series as a process may have at most, latencies with a request's id."""
    telemetry = Telemetry()
    for rank in range(5):
        for stage in ("attention", "shared", "expert", "a2e", "e2a", "gather", "host_copy"):
            name = f"attention-{rank}"
            telemetry.observe(metrics.STAGE, stage, name, value=0.01, request_id="0" * 32)
    while (missing := SERIES - series(telemetry)) > 0:
        telemetry.set(metrics.KV_BLOCKS, f"filler-{missing}", "free", to=1.0)
    return telemetry


def series(telemetry: Telemetry) -> int:
    return sum(not line.startswith("#") for line in telemetry.exposition().splitlines())


def round_s(telemetry: Telemetry) -> float:
    """Seconds of STEPS steps."""
    a = torch.randn(64, 64)
    begun_s = time.perf_counter()
    for number in range(STEPS):
        b = a @ a
        counted = dict.fromkeys(range(100), number)
        telemetry.observe(metrics.STAGE, "attention", "attention-0", value=len(counted) * 1e-4)
    assert b is not None
    return time.perf_counter() - begun_s


def scraper(address: str, per_s: Any, ended: Event, answered: Any) -> None:
    """Asks per_s times a second, if that is not 0, whether or not it has been answered."""
    where, _, path = address.partition("/")
    host, _, port = where.rpartition(":")
    asked = f"GET /{path} HTTP/1.1\r\n\r\n".encode()
    waiting: list[socket.socket] = []
    while not ended.is_set():
        rate = per_s.value
        if not rate:
            waiting = []  # whoever still waits goes
            time.sleep(0.01)
            continue
        begun_s = time.perf_counter()
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((host, int(port)))
        waiting.append(sock)
        _, writable, _ = select.select([], waiting, [], 0)
        for each in writable:
            with contextlib.suppress(OSError):
                each.send(asked)
                each.shutdown(socket.SHUT_WR)
        waiting = [each for each in waiting if not _is_answered(each, answered)][-MOST_WAITING:]
        time.sleep(max(0.0, 1 / rate - (time.perf_counter() - begun_s)))


def _is_answered(sock: socket.socket, answered: Any) -> bool:
    """Or refused."""
    try:
        answered.value += bool(sock.recv(1 << 20))
    except (BlockingIOError, OSError) as error:
        return not isinstance(error, BlockingIOError) and error.errno != errno.ENOTCONN
    return True


def cpu_ms(telemetry: Telemetry, *, open_metrics: bool) -> list[float]:
    """Of this thread, for each exposition."""
    samples = []
    for _ in range(EXPOSITIONS):
        begun_ns = time.thread_time_ns()
        telemetry.exposition(open_metrics=open_metrics)
        samples.append((time.thread_time_ns() - begun_ns) / 1e6)
    return samples


def _lost_s(alone: list[float], times: list[float]) -> list[float]:
    """By how much a round was longer than the one that nobody scraped beside it."""
    return [b - a for a, b in zip(alone, times, strict=True)]


def _other_threads_s() -> float:
    """CPU time so far of all threads but the loop's: the exporter's."""
    return time.process_time() - time.thread_time()


def measure() -> Result:
    torch.set_num_threads(1)
    telemetry = filled()
    exporter = ExporterThread(telemetry, key=None, name="attention-0")
    address = exporter.open("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    per_s, ended = context.Value("d", 0.0), context.Event()
    answered = context.Value("i", 0)
    scraping = context.Process(target=scraper, args=(address, per_s, ended, answered), daemon=True)
    scraping.start()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    counts, others_s = dict.fromkeys(VARIANTS, 0), dict.fromkeys(VARIANTS, 0.0)
    per_s.value, begun_s = VARIANTS["scraped"], time.monotonic()
    while not answered.value:  # it imports first
        assert time.monotonic() - begun_s < READY_S
        round_s(telemetry)
    for _ in range(ROUNDS):
        for name, rate in VARIANTS.items():
            before, per_s.value = answered.value, rate
            before_s = _other_threads_s()
            times[name].append(round_s(telemetry))
            counts[name] += answered.value - before
            others_s[name] += _other_threads_s() - before_s
            per_s.value = 0.0
            time.sleep(PAUSE_S)  # for what still waits
    ended.set()
    scraping.join(SOCKET_S)
    text, open_metrics = (cpu_ms(telemetry, open_metrics=each) for each in (False, True))
    exporter.close()
    samples = {**times, "text_ms": text, "open_metrics_ms": open_metrics}
    summary = {
        "text_ms": statistics.median(text),
        "open_metrics_ms": statistics.median(open_metrics),
        "answered_per_s": {name: counts[name] / sum(times[name]) for name in VARIANTS},
        "exporter_cpu_fraction": {name: others_s[name] / sum(times[name]) for name in VARIANTS},
        "loop_ms_per_scrape": {
            name: 1e3 * statistics.median(_lost_s(times["alone"], times[name])) / per_round
            for name in VARIANTS
            if name != "alone" and (per_round := counts[name] / ROUNDS)
        },
        "time_over_alone": {
            name: statistics.median(b / a for a, b in zip(times["alone"], times[name], strict=True))
            for name in VARIANTS
        },
    }
    settings = {"series": SERIES, "steps": STEPS, "rounds": ROUNDS, "scrapes_per_s": VARIANTS}
    return Result(
        name="scrape_cost", kind="measured", settings=settings, samples=samples, summary=summary
    )


def main() -> None:
    result = measure()
    print(result.summary)
    write_result(result, None)


if __name__ == "__main__":
    main()
