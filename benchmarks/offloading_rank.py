"""A rank's process whose experts are read as if they were larger: see benchmarks/offloaded_ranks.

TIMES in the environment: so many times. RECORD: a file for a line of JSON per read and per hint
that has come: [what, layer, start_s, end_s]; of a read its end is when the rank looked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from typing import TextIO

from actors.channels.base import Packet
from actors.moe import rank_experts
from actors.offload import cache_factory
from benchmarks.larger_experts import LargerTier
from contracts.clock import monotonic_s
from models.experts.expert_cache import HINT_URGENCY
from models.experts.expert_file import ExpertFile
from models.experts.expert_tier import CompletedRead
from tests.support.rank_process import main

ENVIRONMENT, RECORD = "TIMES", "RECORD"
DEMANDED, AHEAD, HINT = "read, wanted", "read, hinted", "hint"


class _RecordedTier(LargerTier):
    def __init__(self, file: ExpertFile, times: int, into: TextIO) -> None:
        super().__init__(file, times)
        self._into, self._what = into, dict[int, tuple[str, int]]()

    def read(self, layer: int, expert: int, part: int, urgency: int) -> int:
        ticket = super().read(layer, expert, part, urgency)
        self._what[ticket] = AHEAD if urgency == HINT_URGENCY else DEMANDED, layer
        return ticket

    def poll_completed(self) -> Iterable[CompletedRead]:
        found, now_s = list(super().poll_completed()), monotonic_s()
        for each in found:
            if each.seconds:
                row = [*self._what[each.ticket], now_s - each.seconds, now_s]
                print(json.dumps(row), file=self._into, flush=True)
        return found


def _record(into: TextIO) -> None:
    prefetch = rank_experts.CachedExperts.prefetch

    def recorded(self: rank_experts.CachedExperts, packet: Packet) -> None:
        header = packet.header
        row = [HINT, header.layer, header.sent_s, packet.arrived_s]
        print(json.dumps(row), file=into, flush=True)
        prefetch(self, packet)

    vars(cache_factory)["FileTier"] = partial(_RecordedTier, times=_times(), into=into)
    rank_experts.CachedExperts.prefetch = recorded  # type: ignore[method-assign]


def _times() -> int:
    return int(os.environ[ENVIRONMENT])


if __name__ == "__main__":
    vars(cache_factory)["FileTier"] = partial(LargerTier, times=_times())
    if path := os.environ.get(RECORD):
        _record(open(path, "a", encoding="utf-8"))  # noqa: SIM115  (until the process ends)
    main()
