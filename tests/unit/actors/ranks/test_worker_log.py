"""Reports and snapshots of a prefill worker's log."""

from __future__ import annotations

import pytest

from actors.ranks.worker_log import WorkerLog
from contracts.routing_messages import OpenRequest, Prompt, RequestKey

BLOCK = 4


def new_log() -> WorkerLog:
    return WorkerLog(2, 7, lambda cached, tokens: tokens - cached, BLOCK)


def prompt(number: int, tokens: int = 9) -> Prompt:
    hashes = tuple(bytes([number, block] * 8) for block in range(tokens // BLOCK))
    return Prompt(RequestKey(0, number), tokens, hashes)


def test_request_is_open_until_it_ends() -> None:
    log = new_log()
    log.accepted(prompt(1))
    assert RequestKey(0, 1) in log
    first = log.report()
    assert first is not None
    assert (first.worker, first.epoch, first.number) == (2, 7, 0)
    assert first.accepted == (prompt(1),)
    assert log.load == 9
    log.ended(RequestKey(0, 1))
    assert RequestKey(0, 1) not in log
    assert log.ends(RequestKey(0, 1))
    second = log.report()
    assert second is not None
    assert (second.number, second.accepted, second.ended) == (1, (), (RequestKey(0, 1),))
    assert log.load == 0
    assert log.report() is None


def test_report_has_the_last_state_of_each_block() -> None:
    log = new_log()
    log.stored([b"a", b"b", b"c"])
    log.evicted([b"b", b"d"])
    log.stored([b"d"])
    report = log.report()
    assert report is not None
    assert set(report.stored) == {b"a", b"c", b"d"}
    assert report.evicted == (b"b",)
    log.evicted([b"a"])
    log.report()
    assert set(log.snapshot().committed) == {b"c", b"d"}


def test_snapshot_has_only_what_was_reported() -> None:
    log = new_log()
    log.stored(prompt(1).hashes)
    log.report()
    log.accepted(prompt(1, tokens=8))
    log.report()
    log.accepted(prompt(2))
    snapshot = log.snapshot()
    assert (snapshot.epoch, snapshot.number) == (7, 1)
    (known,) = snapshot.requests
    assert known == OpenRequest(prompt(1, tokens=8), BLOCK, False)  # never all: the last one counts


def test_closed_request_cannot_end() -> None:
    with pytest.raises(KeyError):
        new_log().ended(RequestKey(0, 1))
