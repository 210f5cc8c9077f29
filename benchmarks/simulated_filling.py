"""A worker below its threshold (simulated): what its policies of holding batches cost, and how far
two runs of the same one differ."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from planner.policies.filling import Filling, FillLimits, PassTimes

Arrivals = Sequence[tuple[float, float]]
"""(second, FLOPs) of requests, in order."""

POLICIES = ("never", "always", "choose")


class SimulatedFilling:
    """Runs batches as `policy` says: "never" or "always" held, or as a `Filling` chooses. A pass
    takes what `times` say, times a normal factor around 1 (jitter: its standard deviation)."""

    def __init__(
        self,
        policy: str,
        limits: FillLimits,
        times: PassTimes,
        jitter: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.policy, self.limits, self.times, self.jitter = policy, limits, times, jitter
        self.rng = rng or random.Random(0)
        self.filling = Filling(limits, times)

    def turnarounds(self, requests: Arrivals) -> list[float]:
        """Seconds, in order of arrival."""
        coming, queue, now_s, taken = deque(requests), deque[tuple[float, float]](), 0.0, []
        while coming or queue:
            if not queue:
                now_s = max(now_s, coming[0][0])
            while coming and coming[0][0] <= now_s:
                queue.append(coming.popleft())
                self.filling.arrived(*queue[-1])
            due_s = self._due_s(now_s, queue[0][0], sum(flops for _, flops in queue))
            if due_s > now_s:
                now_s = min(due_s, coming[0][0] if coming else math.inf)
                continue
            batch = self._batch(queue)
            now_s += self._pass_s(sum(flops for _, flops in batch))
            taken += [now_s - arrived_s for arrived_s, _ in batch]
        return taken

    def _due_s(self, now_s: float, oldest_s: float, flops: float) -> float:
        if self.policy == "choose":
            return self.filling.due_s(now_s, oldest_s, flops)
        if self.policy == "never" or flops >= self.times.full_flops:
            return now_s
        return oldest_s + self.limits.max_wait_s

    def _batch(self, queue: deque[tuple[float, float]]) -> list[tuple[float, float]]:
        batch = [queue.popleft()]
        flops = batch[0][1]
        while queue and flops + queue[0][1] <= self.limits.max_flops:
            batch.append(queue.popleft())
            flops += batch[-1][1]
        return batch

    def _pass_s(self, flops: float) -> float:
        factor = self.rng.gauss(1.0, self.jitter) if self.jitter else 1.0
        return self.times.pass_s(flops) * max(0.5, factor)


def over_the_better(
    arrivals_of: Callable[[int], Arrivals],
    limits: FillLimits,
    times: PassTimes,
    *,
    jitter: float,
    runs: int,
) -> dict[str, float]:
    """The choice over the better policy, and never over never again, each from the requests of a
    run together: medians and 90th percentiles over runs with arrivals of their own. Requests that
    count are those after the first eighth."""
    chosen, again = list[float](), list[float]()
    rng = random.Random(0)
    for seed in range(runs):
        arrivals = arrivals_of(seed)

        def mean_s(policy: str, arrivals: Arrivals = arrivals) -> float:
            worker = SimulatedFilling(policy, limits, times, jitter, rng)
            return statistics.mean(worker.turnarounds(arrivals)[len(arrivals) // 8 :])

        means = {policy: mean_s(policy) for policy in POLICIES}
        chosen.append(means["choose"] / min(means["never"], means["always"]))
        again.append(mean_s("never") / means["never"])
    return {
        "chosen_p50": statistics.median(chosen),
        "chosen_p90": statistics.quantiles(chosen, n=10)[-1],
        "again_p10": statistics.quantiles(again, n=10)[0],
        "again_p90": statistics.quantiles(again, n=10)[-1],
    }
