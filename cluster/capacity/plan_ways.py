"""`tandem plan`: which way a prefill batch should go, by its size, on workers that hold all weights
together."""

from __future__ import annotations

import msgspec

from planner.costs.prefill_ways import Way, batch_seconds, break_even_tokens, prompts_of
from planner.findep.alternatives import Workload, prefill_group

LEAST_PROMPT = 16
TOKENS = (256, 1024, 4096, 16_384, 65_536)  # of a worker's batch


class WayAnswer(msgspec.Struct, kw_only=True):
    """ms of a batch of so many tokens on each worker. resident: if each had all experts."""

    tokens: int
    resident_ms: float
    gathered_ms: float
    all_to_all_ms: float


class WaysAnswer(msgspec.Struct, kw_only=True):
    """gathered_from_tokens: gathering takes no longer from so many tokens of a worker's batch on;
    None: all_to_all is always sooner."""

    batches: list[WayAnswer]
    gathered_from_tokens: int | None
    advice: str


def ways_answer(workload: Workload) -> WaysAnswer:
    """Batches of prompts as the workload's."""
    group, prompt = prefill_group(workload), max(LEAST_PROMPT, workload.sequence_tokens)
    batches = []
    for tokens in TOKENS:
        batch = prompts_of(tokens, prompt)
        ms = {way: 1e3 * batch_seconds(way, batch, group) for way in Way}
        batches.append(
            WayAnswer(
                tokens=tokens,
                resident_ms=ms[Way.RESIDENT],
                gathered_ms=ms[Way.GATHERED],
                all_to_all_ms=ms[Way.ALL_TO_ALL],
            )
        )
    found = break_even_tokens(group, Way.GATHERED, Way.ALL_TO_ALL, prompt_tokens=prompt)
    where = f"Prefill on {workload.devices} workers"
    if found is None:
        advice = f"{where}: all_to_all, whatever a batch holds."
    elif found == 1:
        advice = f"{where}: gathered, whatever a batch holds."
    else:
        advice = (
            f"{where}: all_to_all for batches of less than {found} tokens a worker, gathered from "
            "there on."
        )
    return WaysAnswer(batches=batches, gathered_from_tokens=found, advice=advice)
