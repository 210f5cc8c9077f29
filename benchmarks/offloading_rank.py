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
from actors.experts import caching, rank_experts
from actors.ranks.process import main
from benchmarks.larger_experts import LargerTier
from contracts.clock import monotonic_s
from models.experts.expert_cache import HINT_URGENCY
from models.experts.expert_file import ExpertFile
from models.experts.expert_tier import PartRead

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

    def ended(self) -> Iterable[PartRead]:
        found, now_s = list(super().ended()), monotonic_s()
        for each in found:
            if each.seconds:
                row = [*self._what[each.ticket], now_s - each.seconds, now_s]
                print(json.dumps(row), file=self._into, flush=True)
        return found


def _record(into: TextIO) -> None:
    hinted = rank_experts.SomeThere.hinted

    def recorded(self: rank_experts.SomeThere, packet: Packet) -> None:
        header = packet.header
        row = [HINT, header.layer, header.sent_s, packet.arrived_s]
        print(json.dumps(row), file=into, flush=True)
        hinted(self, packet)

    vars(caching)["FileTier"] = partial(_RecordedTier, times=_times(), into=into)
    rank_experts.SomeThere.hinted = recorded  # type: ignore[method-assign]


def _times() -> int:
    return int(os.environ[ENVIRONMENT])


if __name__ == "__main__":
    vars(caching)["FileTier"] = partial(LargerTier, times=_times())
    if path := os.environ.get(RECORD):
        _record(open(path, "a", encoding="utf-8"))  # noqa: SIM115  (until the process ends)
    main()
