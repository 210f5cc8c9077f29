"""What the next layer may want, told to whoever can read it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from actors.experts.plane import TaskKey
from contracts.clock import Clock
from models.experts.device_lanes import Arrival
from models.experts.expert_wants import Guess
from models.experts.router import Routed
from models.foresight.foresight import Foresight, Foretold, Found
from planner.policies.read_ahead import Trial

Owner = tuple[int, int]
"""Batch, micro-batch."""

_MOST_FORETOLD = 64


class Asked(NamedTuple):
    """What is foretold, with its ids on their way to the host."""

    found: Found
    ids: Arrival


class LookingAhead:
    """Owned by the thread that computes."""

    def __init__(
        self,
        foresight: Foresight,
        hint: Callable[[TaskKey, int, Sequence[Guess]], None],
        forget: Callable[[Owner], None] = lambda owner: None,
        *,
        experts_s: Callable[[], float],
        clock: Clock,
    ) -> None:
        """hint: told what a micro-batch may want of a later layer; forget: that it wants nothing
        more. experts_s: what experts that were not there have cost so far: nothing is foretold
        while that costs more than it saves."""
        self._foresight, self._hint, self._forget = foresight, hint, forget
        self._experts_s, self._clock = experts_s, clock
        self._trial = None if foresight.speculates else Trial()
        self.spent_s = 0.0  # for guesses, so far
        self._cost_s = 0.0  # for experts and guesses, at the last start
        self._was_usual = False
        self._foretold: dict[Owner, list[Foretold]] = {}  # of the layer that comes next

    def __len__(self) -> int:
        """Micro-batches that something is foretold of."""
        return len(self._foretold)

    def starts(self, key: TaskKey, token_ids_T: Tensor) -> None:
        """A micro-batch is about to run."""
        if self._trial is not None:
            self._weigh(self._trial, is_usual=key.decodes)
        self._tell(key, self._foresight.of_tokens, token_ids_T)

    def _weigh(self, trial: Trial, *, is_usual: bool) -> None:
        """is_usual: not of a prompt, which would not compare."""
        cost_s = self._experts_s() + self.spent_s
        if is_usual and self._was_usual:
            trial.passed(cost_s - self._cost_s)
        self._cost_s, self._was_usual = cost_s, is_usual

    def runs(self, key: TaskKey, routed: Routed) -> Routed:
        """The experts that its layer runs: as they were routed, or as they were foretold. Then call
        `begins`."""
        known = [each for each in self._foretold.pop(key.owner, ()) if each.layer == key.layer]
        for foretold in known:
            foretold.learn(routed.topk_ids_TK)
        is_run = key.decodes and self._foresight.is_run(key.layer)
        if is_run and known and known[0].routed is not None:
            return self._foresight.run_instead(known[0], routed)
        return routed

    def begins(self, key: TaskKey, hidden_TD: Tensor, routed: Routed) -> None:
        """They begin; hidden_TD: the residual before them."""
        self._tell(key, self._foresight.before_experts, key.layer, hidden_TD, routed)

    def asks(
        self, key: TaskKey, hidden_TD: Tensor, routed: Routed, fetch: Callable[[Tensor], Arrival]
    ) -> Asked | None:
        """In the place of `begins`, on a device: what is foretold comes to the host by `fetch`;
        then call `comes`. None: nothing is."""
        if self._trial is not None and not self._trial.is_on:
            return None
        start_s = self._clock()
        found = self._foresight.find(key.layer, hidden_TD, routed)
        asked = None if found is None else Asked(found, fetch(found.routed.topk_ids_TK))
        self.spent_s += self._clock() - start_s
        return asked

    def comes(self, key: TaskKey, asked: Asked) -> None:
        """It has come."""
        start_s = self._clock()
        self._pass_on(key, self._foresight.tell(asked.found, asked.ids.tensor.tolist()))
        self.spent_s += self._clock() - start_s

    def ended(self, key: TaskKey, hidden_TD: Tensor) -> None:
        """They have been added."""
        self._tell(key, self._foresight.after_experts, key.layer, hidden_TD)

    def dropped(self, owner: Owner) -> None:
        self._foretold.pop(owner, None)
        self._forget(owner)

    def _tell(self, key: TaskKey, foretell: Callable[..., Foretold | None], *seen: Any) -> None:
        if self._trial is not None and not self._trial.is_on:
            return
        start_s = self._clock()
        foretold = foretell(*seen)
        if foretold is not None:
            self._pass_on(key, foretold)
        self.spent_s += self._clock() - start_s

    def _pass_on(self, key: TaskKey, foretold: Foretold) -> None:
        self._foretold.setdefault(key.owner, []).append(foretold)
        if len(self._foretold) > _MOST_FORETOLD:  # of batches that were dropped while they attended
            self.dropped(next(iter(self._foretold)))
        self._hint(key, foretold.layer, foretold.guesses)
