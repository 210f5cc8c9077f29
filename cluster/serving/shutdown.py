"""End and drain of a running server.

`tandem serve` drains its ingress. Behind Serve's proxy, which sends nothing to a removed
application, ingress and launcher each wait for their open work.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from contracts.logs import event
from contracts.ranks import RankStatus

log = logging.getLogger("tandem.serving")

POLL_PERIOD_S = 0.5
REPLY_TIMEOUT_S = 5.0
DRAIN_PERIOD_S = 0.05


def wait_for_shutdown(
    groups: Any, token: bytes, stop: threading.Event, launcher_timeout_s: float
) -> str:
    """Wait until `stop` is set or the ranks cannot serve any more; return the reason, or "".

    groups: handle of the Groups deployment, which may be silent for `launcher_timeout_s`.
    """
    last_reply_s = time.monotonic()
    while not stop.wait(POLL_PERIOD_S):
        try:
            reason: str = groups.problem.remote(token).result(timeout_s=REPLY_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - any error counts as silence
            event(log, "groups_unreachable", logging.WARNING, error=str(error).partition("\n")[0])
            if time.monotonic() - last_reply_s < launcher_timeout_s + REPLY_TIMEOUT_S:
                continue
            reason = "the launcher of the ranks (Groups) does not answer"
        last_reply_s = time.monotonic()
        if reason:
            return reason
    return ""


def drain(ingress: Any, limit_s: float, skip_drain: threading.Event, replicas: int = 1) -> None:
    """Wait until each ingress replica has answered its requests, the limit, or `skip_drain`.

    Admission stops at once. ingress: handle of the Ingress deployment; each call reaches any
    replica.
    """
    end_s = time.monotonic() + limit_s
    left: dict[str, int] = {}
    while not skip_drain.wait(0.0 if len(left) < replicas else DRAIN_PERIOD_S):
        try:
            name, count = ingress.drain.remote().result(timeout_s=REPLY_TIMEOUT_S)
            left[name] = count
        except TimeoutError:
            pass  # a busy replica
        except Exception as error:  # noqa: BLE001 - a lost ingress has nothing to drain
            event(log, "ingress_unreachable", logging.WARNING, error=str(error).partition("\n")[0])
            if replicas == 1:
                return
        if len(left) >= replicas and not any(left.values()):
            return
        if time.monotonic() > end_s:
            count = sum(left.values())
            event(log, "requests_aborted", logging.WARNING, left=count, after_s=limit_s)
            return


async def wait_idle(status: Callable[[], Awaitable[Sequence[RankStatus]]], limit_s: float) -> int:
    """Wait until no rank has a sequence in two consecutive polls.

    Returns the number left at the limit. An ingress may submit between two polls.
    """
    end_s, was_idle = time.monotonic() + limit_s, False
    while True:
        left = sum(rank.running + rank.waiting for rank in await status())
        if (was_idle and not left) or time.monotonic() >= end_s:
            return left
        was_idle = not left
        await asyncio.sleep(POLL_PERIOD_S)
