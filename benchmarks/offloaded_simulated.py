"""Where the time of a token goes whose experts do not all fit, and what foresight could give back:
*simulated* time, so that equal variants are equal, over what the bundled model wanted and what was
foretold of it, measured.

    python -m benchmarks.offloaded_simulated                                     (a minute)

The cache, its policy and its parts are the real ones; attention, experts and guesses last as long
as given, and reads share a tier of a given rate, two at a time. best: guesses of the best kind at
each layer, always on. free: the same, which cost no time. two deep: and those of the layer behind
(least squares fitted two ahead), when nothing nearer is left to read. oracle: hints are what was
wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.foretelling import fitted, seen
from benchmarks.harness import record
from benchmarks.offloaded_decode import Model, texts
from contracts.requests import Priority
from models.experts.cache_requests import PredictedExpert
from models.experts.expert_cache import ExpertCache
from models.experts.expert_format import ComputeFormat, SlotMemory
from models.experts.expert_tier import CompletedRead
from models.experts.router import RoutedTokens
from models.prediction.expert_predictor import ExpertPredictor, Precision
from models.prediction.signals import features
from planner.scheduling.expert_eviction import eviction
from planner.scheduling.prefetch_trial import pays

ENTRIES, READERS, ROW_TOKENS = 16, 2, 80
VARIANTS: Final = {  # (whose guesses, two deep, what a guess costs: of the option)
    "on demand": ("", False, 0.0),
    "best": ("best", False, 1.0),
    "best, free": ("best", False, 0.0),
    "best, free, two deep": ("best", True, 0.0),
    "oracle": ("oracle", False, 0.0),
    "oracle, two deep": ("oracle", True, 0.0),
}


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedTier:
    """A `Tier` of one part per expert, whose rate is shared by READERS reads at most."""

    parts, expert_bytes = 1, 1

    def __init__(self, time: Time, read_s: float) -> None:
        self._time, self._read_s, self._tickets = time, read_s, 0
        self._asked: dict[int, int] = {}  # ticket -> urgency
        self._active: dict[int, tuple[float, float]] = {}  # ticket -> what is left of it, since
        self._ended: list[CompletedRead] = []

    @property
    def room(self) -> int:
        return ENTRIES - len(self._asked) - len(self._active) - len(self._ended)

    def read(self, layer: int, expert: int, part: int, urgency: int) -> int:
        self._tickets += 1
        self._asked[self._tickets] = urgency
        return self._tickets

    def submit(self) -> None:
        while self._asked and len(self._active) < READERS:
            ticket = min(self._asked, key=lambda each: (self._asked[each], each))
            del self._asked[ticket]
            self._active[ticket] = self._read_s, self._time.now_s

    def advance(self, seconds: float) -> None:
        end_s = self._time.now_s + seconds
        while self._time.now_s < end_s:
            self._step(end_s)

    def wait(self, timeout_s: float) -> None:
        end_s = self._time.now_s + timeout_s
        while self._time.now_s < end_s and not self._ended:
            self._step(end_s)

    def _step(self, end_s: float) -> None:
        """Until a read has ended, at most."""
        now_s, active = self._time.now_s, self._active
        next_s = min((left for left, _ in active.values()), default=end_s) * max(1, len(active))
        spent_s = min(end_s - now_s, next_s)
        self._time.now_s = end_s if spent_s == end_s - now_s else now_s + spent_s
        for ticket, (left_s, since_s) in list(active.items()):
            left_s -= spent_s / len(active)
            active[ticket] = left_s, since_s
        for ticket, (left_s, since_s) in list(active.items()):
            if left_s <= 1e-12:
                del active[ticket]
                self._ended.append(CompletedRead(ticket, self._time.now_s - since_s))
        self.submit()

    def expedite(self, ticket: int, urgency: int) -> None:
        if ticket in self._asked:
            self._asked[ticket] = urgency

    def cancel(self, ticket: int) -> None:
        if self._asked.pop(ticket, None) is not None:
            self._ended.append(CompletedRead(ticket, 0.0))

    def poll_completed(self) -> Iterable[CompletedRead]:
        found, self._ended = self._ended, []
        return found

    def copy(self, ticket: int, into: SlotMemory) -> None:
        """Nothing is in it."""

    def free(self, ticket: int) -> None:
        """Nor is it anywhere."""

    wake = close = submit

    def fileno(self) -> int:
        return -1


class Step(NamedTuple):
    """Of a token at a layer: experts that it wanted, and guesses made there, of later layers."""

    wanted: list[int]
    best: list[PredictedExpert]
    behind: list[PredictedExpert]


def traces(model: Model, rounds: int) -> list[list[list[Step]]]:
    """By text, token and layer."""
    known = ExpertPredictor(model.half, model.profile)
    rows = texts(model.tokenizer, 4 * rounds, ROW_TOKENS)
    deeper = fitted(model, [row for n, row in enumerate(rows) if n % 4 == 2], 2)
    deep = Precision({layer: [0.75, 0.6] for layer in model.spec.moe_layers})  # learned at once
    return [_trace(model, known, deep, deeper.maps, ids) for ids in rows[::4]]


def _trace(
    model: Model, known: ExpertPredictor, deep: Precision, maps: Any, ids: list[int]
) -> list[list[Step]]:
    layers, steps = seen(model, ids), [list[Step]() for _ in ids]
    for layer, one in enumerate(layers):
        router = model.half.router(min(layer + 2, len(layers) - 1))
        assert router is not None
        for token in range(len(ids)):
            rows = slice(token, token + 1)
            of = one.routed
            routed = RoutedTokens(of.x_TD[rows], of.topk_ids_TK[rows], of.topk_weights_TK[rows])
            best = known.predict(layer, one.hidden_TD[rows], routed)
            predicted_experts: list[PredictedExpert] = []
            if layer in maps:
                x_TF = features(routed, model.spec.num_experts)
                two = router.choose(routed.x_TD, x_TF @ maps[layer]).topk_ids_TK.tolist()
                predicted_experts = deep.predicted_experts(layer + 2, two)
                deep.update(layer + 2, two, layers[layer + 2].routed.topk_ids_TK[rows])
            if best is not None:
                best.update(layers[layer + 1].routed.topk_ids_TK[rows])
            wanted = sorted(routed.topk_ids_TK[0].tolist())
            steps[token].append(
                Step(wanted, [] if best is None else best.predicted_experts, predicted_experts)
            )
    return steps


class Setting(NamedTuple):
    """Seconds: of a layer's attention, of an expert's products, of a guess, of a read."""

    attention_s: float
    expert_s: float
    guess_s: float
    read_s: float
    slots: int


class Spent(NamedTuple):
    """Of a token, seconds: in all, waiting, guessing; experts that were read, wanted or wasted."""

    whole_s: float
    waited_s: float
    guessed_s: float
    read: float
    wasted: float


def simulated(model: Model, texts_: list[list[list[Step]]], name: str, setting: Setting) -> Spent:
    whose, deep, dearness = VARIANTS[name]
    time = Time()
    tier, order = SimulatedTier(time, setting.read_s), eviction("walk", setting.slots, {})
    cache = ExpertCache(
        tier, ComputeFormat(model.layout), setting.slots, order, pays, deadline_s=1e9, clock=time
    )
    tokens, guessed_s = 0, 0.0
    for steps in texts_:
        for token in steps:
            tokens += 1
            for layer, step in enumerate(token):
                tier.advance(setting.attention_s)
                request = cache.request(layer, step.wanted, Priority.LS, "me")
                if whose and layer + 1 < len(token):
                    _hint(cache, token, layer, oracle=whose == "oracle", deep=deep)
                    tier.advance(dearness * setting.guess_s)
                    guessed_s += dearness * setting.guess_s
                while request.left:
                    taken = cache.acquire(request, dict.fromkeys(step.wanted, 1), 1)
                    tier.advance(len(taken) * setting.expert_s)
                    cache.done(request, taken)
                    if not taken:
                        cache.wait(1.0)
    traffic, each = cache.traffic, 1.0 / tokens
    of = traffic.read_bytes
    read = each * (of["demand"] + of["used_hint"])
    waited_s = each * traffic.waited_s
    return Spent(each * time.now_s, waited_s, each * guessed_s, read, each * of["wasted_hint"])


def _hint(cache: ExpertCache, token: list[Step], layer: int, *, oracle: bool, deep: bool) -> None:
    """The nearer one goes first: it is a little surer."""
    nearer, behind = token[layer].best, token[layer].behind
    if oracle:
        nearer = [PredictedExpert(expert, 0.99) for expert in token[layer + 1].wanted]
    if deep and layer + 2 < len(token):
        if oracle:
            behind = [PredictedExpert(expert, 0.98) for expert in token[layer + 2].wanted]
        least = min(guess.confidence for guess in nearer)
        behind = [PredictedExpert(expert, min(sure, 0.99 * least)) for expert, sure in behind]
        cache.hint("me", layer + 2, behind)
    cache.hint("me", layer + 1, nearer)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, samples = Model(), dict[str, Any]()
    with torch.inference_mode():
        found = traces(model, options.rounds)
    experts = len(model.spec.moe_layers) * model.spec.num_experts
    for times in options.times:
        for kept in options.kept:
            setting = Setting(
                1e-3 * options.attention_ms,
                1e-3 * options.expert_ms,
                1e-3 * options.guess_ms,
                1e-3 * options.read_ms * times,
                round(kept * experts),
            )
            samples[f"x{times:g}, {kept:.0%} kept"] = {
                name: simulated(model, found, name, setting)._asdict() for name in VARIANTS
            }
    return samples


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a token; gain over on demand; of_oracle: part of its gain, in time saved."""
    found = {}
    for setting, by_name in samples.items():
        base_s = by_name["on demand"]["whole_s"]
        saved_s = base_s - by_name["oracle"]["whole_s"]
        for name, spent in by_name.items():
            found[f"{setting} | {name}"] = {
                "tpot_ms": round(1e3 * spent["whole_s"], 3),
                "gain": round(base_s / spent["whole_s"], 3),
                "of_oracle": round((base_s - spent["whole_s"]) / saved_s, 2),
                "waited_ms": round(1e3 * spent["waited_s"], 3),
                "guessed_ms": round(1e3 * spent["guessed_s"], 3),
                "read": round(spent["read"], 2),
                "wasted": round(spent["wasted"], 2),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="texts")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--times", type=float, nargs="+", default=[1, 2, 4], help="a read's length")
    parser.add_argument("--attention-ms", type=float, default=0.21, help="of a layer")
    parser.add_argument("--expert-ms", type=float, default=0.07)
    parser.add_argument("--guess-ms", type=float, default=0.06, help="of a layer")
    parser.add_argument("--read-ms", type=float, default=0.14, help="of an expert, alone")
    parser.add_argument("--output", type=Path, help="result file (default benchmarks/results/)")
    options = parser.parse_args()
    samples = run(options)
    found = summary(samples)
    for name, row in found.items():
        print(f"{name:40} {row}")
    record("offloaded_simulated", options, samples, found, kind="simulated")


if __name__ == "__main__":
    main()
