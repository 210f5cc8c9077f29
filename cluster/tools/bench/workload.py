"""Requests of a load test: arrivals and prompts, drawn or from a trace, results and statistics."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from cluster.tools.bench.datasets import Lengths, TraceRow
from contracts.requests import Priority


class RequestArrival(NamedTuple):
    """at_s: after the start. prompt: None for random words; a list for a turn's messages."""

    at_s: float
    priority: Priority
    lengths: Lengths
    prompt: BlockPrompt | list[dict[str, Any]] | None = None


Draw = Callable[[random.Random], Lengths]


def always(prompt: int, output: int) -> Draw:
    return lambda _: Lengths(prompt, output)


def chat_lengths(most: Lengths = Lengths(512, 256)) -> Draw:  # noqa: B008
    """Return a sampler similar to ShareGPT's first turns: lognormal, medians 75 and 100."""

    def draw(rng: random.Random) -> Lengths:
        prompt, output = rng.lognormvariate(4.3, 0.8), rng.lognormvariate(4.6, 0.6)
        return Lengths(
            min(max(4, round(prompt)), most.prompt), min(max(1, round(output)), most.output)
        )

    return draw


def poisson(
    rate: float, seconds: float, draw: Draw, ls: float, rng: random.Random
) -> list[RequestArrival]:
    """Draw Poisson arrivals. rate: per second. ls: fraction of latency-sensitive requests."""
    arrivals, at_s = [], 0.0
    while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < seconds:
        priority = Priority.LS if rng.random() < ls else Priority.BE
        arrivals.append(RequestArrival(at_s, priority, draw(rng)))
    return arrivals


# Single tokens, behind a space, in common vocabularies.
WORDS: Final = """the of and to in that was his it is for as on be at by this had not are but from
    or have an they which one you were her all she there would their we him been has when who will
    more no if out so what up its about into than them can only other new some could time these two
    may then do first any my now such like our over man me""".split()  # noqa: SIM905


class BlockPrompt(NamedTuple):
    """Blocks that other prompts may share. repeated_tokens: length of an earlier prompt's start."""

    hash_ids: tuple[int, ...]
    block_tokens: int
    repeated_tokens: int


def prompt_text(prompt: BlockPrompt, tokens: int, seed: int) -> str:
    """Return a text of about `tokens` tokens in which equal ids are equal words."""
    sizes = [prompt.block_tokens] * (len(prompt.hash_ids) - 1)
    sizes.append(tokens - sum(sizes))
    return " ".join(
        _block(hash_id, size, seed) for hash_id, size in zip(prompt.hash_ids, sizes, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _block(hash_id: int, tokens: int, seed: int) -> str:
    return " ".join(random.Random(f"{seed} {hash_id}").choices(WORDS, k=tokens))


def from_trace(
    rows: Sequence[TraceRow],
    *,
    seconds: float,
    divisor: int,
    block_tokens: int,
    ls: float,
    rng: random.Random,
) -> list[RequestArrival]:
    """Scale a trace to a smaller machine.

    Arrivals keep their pattern, within `seconds`; lengths and blocks are divided. block_tokens: in
    the trace. ls: fraction that is drawn to be latency-sensitive.
    """
    stretch, arrivals = seconds / rows[-1].at_s, []
    starts: set[int] = set()  # hashes of all starts of earlier prompts
    for row in rows:
        tokens, prompt = max(4, row.lengths.prompt // divisor), None
        if row.hash_ids:
            size, before_last = block_tokens // divisor, len(row.hash_ids) - 1
            last = (row.lengths.prompt - before_last * block_tokens) // divisor
            tokens = before_last * size + max(1, min(size, last))
            start = repeated = 0
            for place, hash_id in enumerate(row.hash_ids, 1):
                start = hash((start, hash_id))
                if start in starts:
                    repeated = min(place * size, tokens)
                starts.add(start)
            prompt = BlockPrompt(row.hash_ids, size, repeated)
        priority = Priority.LS if rng.random() < ls else Priority.BE
        lengths = Lengths(tokens, max(1, row.lengths.output // divisor))
        arrivals.append(RequestArrival(row.at_s * stretch, priority, lengths, prompt))
    return arrivals


class RequestResult(msgspec.Struct):
    """Result of one request.

    Times are seconds after the start; latencies count from the arrival, not from sending. tokens_s:
    arrival of each piece of the answer. usage_tokens: generated tokens as reported by the server,
    or 0; prompt_tokens and cached_tokens likewise. repeated_tokens: of the prompt that an earlier
    one starts with, too. detail: the server's error message. retry_s: Retry-After of a refusal.
    """

    arrival: RequestArrival
    sent_s: float = math.nan
    tokens_s: list[float] = []
    end_s: float = math.nan
    error: str = ""
    detail: str = ""
    retry_s: float | None = None
    usage_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    repeated_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Return the server's count of tokens, or else the number of pieces."""
        return self.usage_tokens or len(self.tokens_s)

    @property
    def tpot_s(self) -> float:
        """Return the mean time per token after the first; NaN of one token."""
        if self.tokens < 2:
            return math.nan
        return (self.tokens_s[-1] - self.tokens_s[0]) / (self.tokens - 1)

    @property
    def turnaround_s(self) -> float:
        return self.end_s - self.arrival.at_s

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Return whether it was answered, within each objective in ms. NaN is within any."""
        if self.error:
            return False
        found = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.turnaround_s}
        return not any(1e3 * found[name] > most_ms for name, most_ms in objectives.items())


def percentile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank percentile; NaN of no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class LatencyStats(msgspec.Struct, frozen=True):
    """Statistics in milliseconds; None without values."""

    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @staticmethod
    def of(times_s: Iterable[float]) -> LatencyStats:
        found = sorted(1e3 * each for each in times_s if not math.isnan(each))
        if not found:
            return LatencyStats()
        center = mean(found)
        std = math.sqrt(mean([(each - center) ** 2 for each in found]))
        return LatencyStats(center, std, *[percentile(found, q) for q in (0.5, 0.9, 0.95, 0.99)])


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of some requests, named as in the results of `vllm bench serve`.

    failed: of any kind, refused and not sent ones too; error_counts: by status or reason;
    error_examples: one message of each. duration: seconds from the first arrival to the last end.
    total_input_tokens: as counted by the server, or else as requested. repeated_prefix_tokens: of
    prompts whose start an earlier one has, too. request_goodput: per second; None without
    objectives. max_late_ms: largest delay between arrival and sending.
    """

    num_prompts: int
    completed: int
    failed: int
    error_counts: dict[str, int]
    error_examples: dict[str, str]
    duration: float
    requested_input_tokens: int
    total_input_tokens: int
    total_cached_tokens: int
    repeated_prefix_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    good_request_fraction: float | None
    output_throughput: float
    total_token_throughput: float
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    max_late_ms: float


def summarize(
    outcomes: Sequence[RequestResult], objectives: Mapping[str, float] | None = None
) -> LoadSummary:
    """objectives: upper bounds in ms of a good request's ttft, tpot and e2el."""
    done = [each for each in outcomes if not each.error]
    ends_s = [each.end_s for each in outcomes if not math.isnan(each.end_s)]
    seconds = max(ends_s, default=0.0) - min((each.arrival.at_s for each in outcomes), default=0.0)
    late_s = [each.sent_s - each.arrival.at_s for each in outcomes if not math.isnan(each.sent_s)]
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    good = sum(each.meets(objectives) for each in outcomes) if objectives else None
    tokens_in = sum(each.prompt_tokens or each.arrival.lengths.prompt for each in done)
    tokens_out = sum(each.tokens for each in done)
    return LoadSummary(
        num_prompts=len(outcomes),
        completed=len(done),
        failed=len(outcomes) - len(done),
        error_counts=dict(Counter(each.error for each in outcomes if each.error).most_common()),
        error_examples={each.error: each.detail for each in outcomes if each.detail},
        duration=seconds,
        requested_input_tokens=sum(each.arrival.lengths.prompt for each in done),
        total_input_tokens=tokens_in,
        total_cached_tokens=sum(each.cached_tokens for each in done),
        repeated_prefix_tokens=sum(each.repeated_tokens for each in done),
        total_output_tokens=tokens_out,
        request_throughput=len(done) * per_s,
        request_goodput=None if good is None else good * per_s,
        good_request_fraction=None if good is None else good / max(1, len(outcomes)),
        output_throughput=tokens_out * per_s,
        total_token_throughput=(tokens_in + tokens_out) * per_s,
        ttft=LatencyStats.of(each.ttft_s for each in done),
        tpot=LatencyStats.of(each.tpot_s for each in done),
        itl=LatencyStats.of(gap for each in done for gap in each.gaps_s),
        e2el=LatencyStats.of(each.turnaround_s for each in done),
        max_late_ms=1e3 * max(late_s, default=0.0),
    )
