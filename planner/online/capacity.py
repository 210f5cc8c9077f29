"""Headroom of a running group for its recent traffic, and the gain of a further rank.

    traffic of the last minute -> mix of one attention rank and second
    mix -> fullest batch of it -> its makespan under the best plan -> seconds of mix per second

At the knee a batch is as full as memory and limits allow, so launches are shared by more tokens
than now. A busy fraction does not show that.

Headroom of a prefill worker, from its own batch times (`PrefillCapacity`): a batch takes alpha +
beta * x, where x is the time of such a batch in the reference passes at start: large products are
faster per FLOP than small ones, and a line through small batches misses that. Without reference
passes x is the FLOPs.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from contracts.planner_messages import BatchReport, TrafficReport
from planner.costs.fit import OnlineLinear
from planner.costs.model_shape import Chunks, count_tokens
from planner.costs.stages import Linear, PlanSpec
from planner.schedule.batch_plan import ChunkTime, planned_batch, replayed_ms
from planner.schedule.solver import PlannedBatch

WINDOW_S = 60.0
MAX_DEVICES = 16  # up to which all splits are compared, else those near the present one
_NEAR = 4
_AMOUNTS = attrgetter("decode_tokens", "positions", "prompts", "prompt_tokens", "starts")


class TrafficMix(NamedTuple):
    """Traffic of one attention rank per second.

    positions: sum of the positions of decoded tokens. prompts: chunks of prompts. starts: sum of
    the tokens before them. sequences: the most that run at once.
    """

    decode_tokens: float
    positions: float
    prompts: float
    prompt_tokens: float
    starts: float
    sequences: int

    @property
    def is_empty(self) -> bool:
        return self.decode_tokens <= 0 and self.prompts <= 0


class Capacity(NamedTuple):
    """Result of `capacity`.

    used_fraction: present traffic over possible traffic of the same mix. gains: by kind, the gain
    of one more rank as a fraction. in_use: by resource, at the knee. best: (attention ranks, expert
    ranks) of as many devices.
    """

    used_fraction: float
    gains: Mapping[str, float]
    in_use: Mapping[str, float]
    best: tuple[int, int]


class Traffic:
    """Traffic of the attention ranks in the last WINDOW_S, from their reports."""

    def __init__(self, max_sequences: int) -> None:
        """Create a record; max_sequences: of a batch."""
        self._max_sequences = max_sequences
        self._reports: dict[str, deque[tuple[float, TrafficReport]]] = {}

    def add(self, report: TrafficReport, now_s: float) -> None:
        self._reports.setdefault(report.rank, deque(maxlen=1024)).append((now_s, report))

    def mix(self, now_s: float, attention_ranks: int) -> TrafficMix:
        """Return the mean over all attention ranks, idle ones included."""
        sums = [0.0] * 5
        pool_tokens = 0
        for reports in self._reports.values():
            while reports and reports[0][0] <= now_s - WINDOW_S:
                reports.popleft()
            if not reports:
                continue
            ended_s, first = reports[0]
            window_s = min(WINDOW_S, now_s - (ended_s - first.seconds))
            for end_s, report in reports:
                inside_s = min(report.seconds, end_s - (now_s - window_s))
                share = inside_s / report.seconds / window_s / attention_ranks
                for index, amount in enumerate(_AMOUNTS(report)):
                    sums[index] += share * amount
            pool_tokens = reports[-1][1].pool_tokens
        decode_tokens, positions, prompts, prompt_tokens, starts = sums
        context = max(1.0, positions / decode_tokens if decode_tokens else 1.0)
        sequences = min(self._max_sequences, max(1, math.floor(pool_tokens / context)))
        return TrafficMix(decode_tokens, positions, prompts, prompt_tokens, starts, sequences)


class GroupSetup(NamedTuple):
    """An immutable view of a running group for use by another thread.

    specs: by (attention ranks, expert ranks), one token a sample. chunk_times: of a sequence in a
    layer, by expert ranks. expected_ms: of a predicted makespan and a number of sequences, the time
    until the next batch starts.
    """

    attention_ranks: int
    expert_ranks: int
    specs: Mapping[tuple[int, int], PlanSpec]
    chunk_times: Mapping[int, ChunkTime]
    expected_ms: Callable[[float, int], float]


def capacity(
    group: GroupSetup, mix: TrafficMix, ran: Sequence[BatchReport] = ()
) -> Capacity | None:
    """Return the capacity, or None while a stage is cold or without traffic.

    ran: recent batches, preferably large; their inefficiency against the best plans also applies to
    batches at the knee. Raises ValueError for a mix that no stage model can price.
    """
    ag, eg = group.attention_ranks, group.expert_ranks
    inefficiency, base_expected_ms = plan_inefficiency(group, ran), group.expected_ms
    group = group._replace(
        expected_ms=lambda ms, sequences: base_expected_ms(inefficiency * ms, sequences)
    )
    now = _knee(group, mix, ag, eg)
    if now is None:
        return None
    rates = {(ag, eg): now.mix_s_per_s * ag}  # of all attention ranks
    for ranks in other_sizes(ag, eg):
        knee = _knee(group, mix, *ranks)
        if knee is not None:
            rates[ranks] = knee.mix_s_per_s * ranks[0]
    larger = {"attention": (ag + 1, eg), "expert": (ag, eg + 1)}
    gains = {
        kind: rates[ranks] / rates[ag, eg] - 1 for kind, ranks in larger.items() if ranks in rates
    }
    splits = [ranks for ranks in rates if sum(ranks) == ag + eg]
    return Capacity(1 / now.mix_s_per_s, gains, now.in_use, max(splits, key=rates.__getitem__))


def plan_inefficiency(group: GroupSetup, ran: Sequence[BatchReport]) -> float:
    """Return the makespans of batches under their plans over those under the best, at least 1.

    A plan in use is shared by all batches of a shape, or the default.
    """
    spec = group.specs.get((group.attention_ranks, group.expert_ranks))
    if spec is None:
        return 1.0
    chunk_ms = group.chunk_times[group.expert_ranks]
    best_ms = actual_ms = 0.0
    for report in ran:
        parts = [times.batch for times in report.micro_batches]
        whole = [chunk for part in parts for chunk in part]
        if not report.plan.sequence_chunks and count_tokens(whole) <= spec.max_samples:
            best_ms += planned_batch(spec, whole, chunk_ms).makespan_ms
            actual_ms += replayed_ms(spec, chunk_ms, report.plan, parts)
    return max(1.0, actual_ms / best_ms) if best_ms > 0 else 1.0


class _Knee(NamedTuple):
    mix_s_per_s: float  # seconds of the mix of one attention rank, computed per second
    in_use: dict[str, float]


def other_sizes(ag: int, eg: int) -> list[tuple[int, int]]:
    """Return the group sizes that `capacity` compares with the present one."""
    return [(ag + 1, eg), (ag, eg + 1), *_splits(ag, eg)]


def _splits(ag: int, eg: int) -> list[tuple[int, int]]:
    devices = ag + eg
    ranks = range(1, devices)
    if devices > MAX_DEVICES:
        ranks = range(max(1, ag - _NEAR), min(devices, ag + _NEAR + 1))
    return [(each, devices - each) for each in ranks if each != ag]


def _knee(group: GroupSetup, mix: TrafficMix, ag: int, eg: int) -> _Knee | None:
    spec = group.specs.get((ag, eg))
    if spec is None or mix.is_empty:
        return None
    rows, prompts, mix_s = _fullest(mix, spec.max_samples)
    whole, part = math.floor(prompts), prompts - math.floor(prompts)
    less_ms, less_in_use = _batch_time(group, (ag, eg), mix, rows, whole)
    more_ms, more_in_use = less_ms, less_in_use
    if part > 0:
        more_ms, more_in_use = _batch_time(group, (ag, eg), mix, rows, whole + 1)
    if not (less_in_use or more_in_use):
        return None
    ms = (1 - part) * less_ms + part * more_ms
    return _Knee(1e3 * mix_s / ms, more_in_use or less_in_use)


def _fullest(mix: TrafficMix, max_tokens: int) -> tuple[int, float, float]:
    """Return the fullest batch of the mix: decode rows, prompt chunks, seconds of mix."""
    if mix.decode_tokens > 0:
        tokens_per_row = 1 + mix.prompt_tokens / mix.decode_tokens
        sequences_per_row = 1 + mix.prompts / mix.decode_tokens
        most = min(mix.sequences / sequences_per_row, max_tokens / tokens_per_row)
        rows = max(1, math.floor(most))
        mix_s = rows / mix.decode_tokens
        return rows, mix_s * mix.prompts, mix_s
    tokens_per_chunk = max(1.0, mix.prompt_tokens / mix.prompts)
    chunks = min(mix.sequences, max(1, math.floor(max_tokens / tokens_per_chunk)))
    return 0, float(chunks), chunks / mix.prompts


def fullest_tokens(mix: TrafficMix, max_tokens: int) -> float:
    """Return the tokens of the fullest batch of the mix."""
    if mix.is_empty:
        return float(max_tokens)
    rows, prompts, _ = _fullest(mix, max_tokens)
    per_prompt = mix.prompt_tokens / mix.prompts if mix.prompts > 0 else 0.0
    return min(float(max_tokens), max(1.0, rows + prompts * per_prompt))


def _batch_time(
    group: GroupSetup, ranks: tuple[int, int], mix: TrafficMix, rows: int, prompts: int
) -> tuple[float, dict[str, float]]:
    """Return a batch's ms under its plan, and the fraction in which each resource is in use.

    An empty batch takes 0 ms and uses nothing.
    """
    spec, chunk_ms = group.specs[ranks], group.chunk_times[ranks[1]]
    at = _mean(mix.positions, mix.decode_tokens)
    batch = [(at, at + 1)] * rows
    start, new = _mean(mix.starts, mix.prompts), max(1, _mean(mix.prompt_tokens, mix.prompts))
    room = spec.max_samples - rows
    batch += [(start, start + new)] * min(prompts, room // new)
    if prompts and room // new < prompts and room > 0:  # rounding, or a very large chunk
        batch.append((start, start + max(1, min(new, room % new))))
    if not batch:
        return 0.0, {}
    planned = planned_batch(spec, batch, chunk_ms)
    ms = group.expected_ms(planned.makespan_ms, len(batch))
    return ms, _in_use(spec, batch, sum(chunk_ms(*chunk) for chunk in batch), planned)


def _in_use(
    spec: PlanSpec, batch: Chunks, chunks_ms: float, planned: PlannedBatch
) -> dict[str, float]:
    tokens = count_tokens(batch)
    plan, stages = planned.plan, spec.stages
    calls, me = plan.r1 * plan.r2, spec.me(tokens, 1)
    layer_ms = planned.makespan_ms / spec.num_layers
    attention_ms = plan.r1 * stages.attention.alpha_ms + chunks_ms
    attention_ms += plan.r1 * spec.shared.alpha_ms + spec.shared.beta_ms * tokens
    busy_ms = {"attention": attention_ms} | {
        name: calls * stage.alpha_ms + stage.beta_ms * me
        for name, stage in (("experts", stages.expert), ("a2e", stages.a2e), ("e2a", stages.e2a))
    }
    return {name: min(1.0, ms / layer_ms) for name, ms in busy_ms.items()}


def _mean(total: float, count: float) -> int:
    return round(total / count) if count > 0 else 0


COLD_BATCHES = 8
_UNIT = 1e9  # FLOPs, so that neither coefficient is tiny


class Batch(NamedTuple):
    """A batch; ms is None if it did not run alone."""

    ended_s: float
    flops: float
    tokens: int
    sequences: int
    ms: float | None


class ReferenceTime(NamedTuple):
    flops: float
    ms: float


class ReferenceCurve:
    """FLOPs to ms: linear between the points, constant below, a constant rate above."""

    def __init__(self, times: Sequence[ReferenceTime]) -> None:
        """Create a curve. Raises ValueError unless there is a point and all are above 0."""
        self._times = sorted(times)
        if not self._times or min(min(each) for each in self._times) <= 0:
            raise ValueError(f"reference times {times}: give one or more, of FLOPs and ms above 0")

    def at(self, flops: float) -> float:
        last = self._times[-1]
        if flops >= last.flops:
            return last.ms * flops / last.flops
        times_N2 = np.array(self._times)
        return float(np.interp(flops, times_N2[:, 0], times_N2[:, 1]))


class PrefillCapacity:
    """Capacity of one worker; owned by one thread, except for `used_fraction`."""

    def __init__(self, *, max_tokens: int, max_sequences: int, started_s: float) -> None:
        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        self._started_s = started_s
        self._batches: deque[Batch] = deque(maxlen=16_384)
        self._curve: ReferenceCurve | None = None
        self._model: OnlineLinear | None = None
        self._timed: list[tuple[float, float]] = []

    def refer(self, times: Sequence[ReferenceTime]) -> None:
        """Set the reference times, before the first `add`."""
        self._curve = ReferenceCurve(times)

    def add(self, batch: Batch) -> None:
        self._batches.append(batch)
        if batch.ms is None or batch.ms <= 0:
            return
        x = self._size(batch.flops)
        if self._model is not None:
            self._model.update(x, batch.ms)
            return
        self._timed.append((x, batch.ms))
        if len(self._timed) == COLD_BATCHES:
            mean_x = sum(x for x, _ in self._timed) / COLD_BATCHES
            mean_ms = sum(ms for _, ms in self._timed) / COLD_BATCHES
            self._model = OnlineLinear(Linear(0.0, mean_ms / mean_x), mean_x, prior_samples=1)
            for x, ms in self._timed:
                self._model.update(x, ms)

    def used_fraction(self, now_s: float) -> float:
        """Return the traffic of the last minute over the possible traffic; 0 while unknown."""
        window_s = min(WINDOW_S, now_s - self._started_s)
        late = [batch for batch in list(self._batches) if batch.ended_s > now_s - window_s]
        if not late or self._model is None or window_s <= 0:
            return 0.0
        flops, tokens = sum(b.flops for b in late), sum(b.tokens for b in late)
        sequences = sum(b.sequences for b in late)
        full = min(self._max_tokens / tokens, self._max_sequences / sequences)  # of the traffic
        full_ms = self._model.model.at(self._size(full * flops))
        return full_ms / full / (1e3 * window_s)

    def _size(self, flops: float) -> float:
        return flops / _UNIT if self._curve is None else self._curve.at(flops)
