"""How long a group takes to get one expert rank more, or to let one go, and what streams feel.

    python -m benchmarks.resize_times              six rounds of 2 -> 3 -> 2 expert ranks
    python -m benchmarks.resize_times --rounds 3 --bytes-per-s 2e7

Ranks are processes of this machine, without Ray. A stream on each of two attention ranks goes on
all the time; every generation is held against the tokens of the first. The times between two tokens
of a stream are put beside each other phase by phase of the same round:

    before   two expert ranks, nothing happens
    start    a third is started, loads nothing, and is joined
    more     experts move to it, until all attention ranks have gone over
    three    three expert ranks, nothing happens
    fewer    experts move off it again
    after    two expert ranks
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.ranks.expert_resize import place_experts
from benchmarks.harness import Result, write_result
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.repair_times import MODEL, TOKENS, Stream, stream
from contracts.config import TandemConfig
from contracts.errors import LaunchError
from contracts.loading import config_from
from tests.support.local_group import LocalGroup

PHASES = ("before", "start", "more", "three", "fewer", "after")
CALM_S = 5.0
CALM_BEFORE = {"start": "before", "more": "before", "fewer": "three", "after": "before"}


class Round:
    """Of one round: when each phase ended."""

    def __init__(self) -> None:
        self.ends_s = [time.monotonic()]

    def ended(self) -> None:
        self.ends_s.append(time.monotonic())

    def seconds(self) -> dict[str, float]:
        pairs = itertools.pairwise(self.ends_s)
        return {name: end - start for name, (start, end) in zip(PHASES, pairs, strict=True)}

    def pauses_ms(self, streams: Sequence[Stream]) -> dict[str, list[float]]:
        """Between two tokens of a stream, by the phase in which the second came."""
        found: dict[str, list[float]] = {name: [] for name in PHASES}
        for one in streams:
            for before, later in itertools.pairwise(list(one.at_s)):
                place = int(np.searchsorted(self.ends_s, later)) - 1
                if 0 <= place < len(PHASES):
                    found[PHASES[place]].append(1e3 * (later - before))
        return found


def one_round(group: LocalGroup, config: TandemConfig) -> Round:
    found = Round()
    time.sleep(CALM_S)
    found.ended()
    group.start_experts(3)
    found.ended()
    place_experts(group.working, 3, config)
    found.ended()
    time.sleep(CALM_S)
    found.ended()
    place_experts(group.working, 2, config)
    found.ended()
    group.resize_experts(2)  # the third goes
    time.sleep(CALM_S)
    found.ended()
    return found


def measure(folder: Path, rounds: int, bytes_per_s: float) -> list[dict[str, dict[str, float]]]:
    tree = {
        "model": {"dtype": "float32"},
        "groups": {"attention_ranks": 2, "expert_ranks": 2},
        "kv": {"pool_tokens": 16 * 512},
        "placement": {"bytes_per_s": bytes_per_s},
    }
    config = config_from(tree, source="benchmark")
    found = []
    with LocalGroup(str(folder), config) as group:
        streams = [stream(group, name) for name in ("attention-0", "attention-1")]
        for _ in range(rounds):
            one = one_round(group, config)
            found.append(told(one, streams))
            print(found[-1]["seconds"], found[-1]["p99_ms"], flush=True)
        for each in streams:
            each.ended.set()
            each.join()
            if each.wrong or not each.whole:
                raise LaunchError(f"{each.wrong} of {each.whole} generations were not as the first")
    return found


def told(one: Round, streams: Sequence[Stream]) -> dict[str, dict[str, float]]:
    pauses_ms = one.pauses_ms(streams)
    found = {"seconds": one.seconds()}
    for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0)):
        found[name] = {phase: float(np.quantile(ms, q)) for phase, ms in pauses_ms.items()}
    found["tokens"] = {phase: float(len(ms)) for phase, ms in pauses_ms.items()}
    return found


def summary_of(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; over_calm: of each round's own ratio, to the calm time before it."""
    found: dict[str, dict[str, float]] = {}
    for name in ("seconds", "p50_ms", "p99_ms", "max_ms", "tokens"):
        found[name] = {
            phase: float(np.median([each[name][phase] for each in rounds])) for phase in PHASES
        }
    for name in ("p50_ms", "p99_ms"):
        found[f"{name}_over_calm"] = {
            phase: float(np.median([each[name][phase] / each[name][calm] for each in rounds]))
            for phase, calm in CALM_BEFORE.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--bytes-per-s", type=float, default=100e6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_checkpoint(Path(folder), MODEL)
        rounds = measure(model, options.rounds, options.bytes_per_s)
    summary = summary_of(rounds)
    for name, by_phase in summary.items():
        print(name, {phase: round(value, 2) for phase, value in by_phase.items()})
    settings = {
        "rounds": options.rounds,
        "bytes_per_s": options.bytes_per_s,
        "tokens": TOKENS,
        "model": MODEL,
        "calm_s": CALM_S,
    }
    samples = {f"round {number}": one for number, one in enumerate(rounds)}
    result = Result(
        name="resize_times", kind="measured", settings=settings, samples=samples, summary=summary
    )
    print(write_result(result, options.json))


if __name__ == "__main__":
    main()
