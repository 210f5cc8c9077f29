"""The same question to many ranks at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import ray

from actors.ranks.remote import RayRank
from contracts.events import TaskSpan
from contracts.logs import event
from contracts.worker import RankStatus

log = logging.getLogger("tandem.launch")


def statuses(ranks: Sequence[RayRank], timeout_s: float) -> list[RankStatus]:
    """What each rank says of itself; a rank that does not answer is unhealthy."""
    futures = [(rank.name, rank.call("status")) for rank in ranks]
    answers = []
    for name, future in futures:
        try:
            answers.append(future.result(timeout_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is that rank's state
            answers.append(RankStatus(name=name, healthy=False, reason=str(error)))
    return answers


def expositions(ranks: Sequence[RayRank], timeout_s: float) -> list[str]:
    """Prometheus text of each rank that answers."""
    futures = [(rank.name, rank.call("metrics")) for rank in ranks]
    texts: list[str] = []
    for name, future in futures:
        try:
            texts.append(future.result(timeout_s))
        except Exception as error:  # noqa: BLE001 - a scrape shows the ranks that answer
            event(log, "rank_metrics_failed", logging.WARNING, name=name, error=error)
    return texts


def recorded_spans(ranks: Sequence[RayRank], timeout_s: float) -> list[TaskSpan]:
    """Of all ranks, in order of their start. Raises what a rank raises."""
    futures = [rank.call("spans") for rank in ranks]
    spans = [span for future in futures for span in future.result(timeout_s)]
    return sorted(spans, key=lambda span: span.start_s)


def stop_all(ranks: Sequence[RayRank], timeout_s: float) -> None:
    """Ends the loops in order, then the actors."""
    futures = [rank.call("stop") for rank in ranks]
    for rank, future in zip(ranks, futures, strict=True):
        try:
            future.result(timeout_s)
        except Exception as error:  # noqa: BLE001 - it is killed next, whatever it answers
            event(log, "rank_stop_failed", logging.WARNING, name=rank.name, error=error)
        ray.kill(rank.actor)
