"""What a server reports of itself in /metrics."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class ServerState(msgspec.Struct, frozen=True):
    """KV blocks by rank and state, sequences that wait, ranks that were replaced."""

    at_s: float
    blocks: dict[str, dict[str, int]]
    waiting: int
    restarts: int


def read_metrics(text: str, at_s: float) -> ServerState:
    blocks: dict[str, dict[str, int]] = {}
    waiting = restarts = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tandem_kv_blocks":
                states = blocks.setdefault(sample.labels["rank"], {})
                states[sample.labels["state"]] = int(sample.value)
            elif sample.name == "tandem_requests_waiting":
                waiting += int(sample.value)
            elif sample.name == "tandem_rank_restarts_total":
                restarts += int(sample.value)
    return ServerState(round(at_s, 1), blocks, waiting, restarts)
