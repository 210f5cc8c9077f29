"""Experts here, as many as there are slots for; the others are read when they are wanted.

    attention │ wait │ experts that are there │ … those that have come │ attention
    tier       ══════ missing ════ missing ═══                    ══ hints for the next layer ══

A micro-batch goes on with what is there, run by run, and is not ready while nothing is. Outputs are
added in the order of the experts whatever order they came in: the bits are those of resident
experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.experts.plane import TaskKey
from actors.telemetry.timeline import Timeline
from contracts.clock import Clock
from contracts.errors import ChannelError
from contracts.events import Stage, TaskSpan
from contracts.plan import Plan
from kernels.experts import RUN_PAIRS, weighted_run
from kernels.routing import group_by_expert, local_index
from kernels.steps import Steps
from models.decoder.decoder import AttentionHalf
from models.experts.expert_cache import ExpertCache, Taken, Want
from models.experts.expert_loading import clamped_gate
from models.experts.router import Routed
from models.foresight.foresight import Foresight, Ids

Whose = tuple[int, int]  # batch, micro-batch

_MOST_FORETOLD = 64
_LOOK_S = 0.05  # for experts, where a task is gone on with although none is there


class CachedPending:
    """Rows, sorted by expert, and what has been added up of them. rows_N, weights_N: of expert e
    those from first_of[e] on."""

    def __init__(self, key: TaskKey, routed: Routed, identity_E: Tensor) -> None:
        self.key, self.x_TD = key, routed.x_TD
        ids_TK, weights_TK = routed.topk_ids_TK, routed.topk_weights_TK
        self.rows_N, self.weights_N, counts = group_by_expert(
            ids_TK, weights_TK, identity_E, len(identity_E)
        )
        self.pairs = {expert: count for expert, count in enumerate(counts) if count}
        self.first_of: dict[int, int] = {}
        first = 0
        for expert, count in self.pairs.items():
            self.first_of[expert] = first
            first += count
        self.out_TD = torch.zeros(routed.x_TD.shape, dtype=torch.float32)
        self.want: Want
        self._came: dict[int, Tensor] = {}  # by first pair: what cannot be added yet
        self._added = 0  # pairs

    @property
    def is_complete(self) -> bool:
        return self.want.can_go_on

    def add(self, first: int, weighted_ND: Tensor) -> None:
        """What a run of experts gave, for the pairs from `first` on."""
        self._came[first] = weighted_ND
        while (ready_ND := self._came.pop(self._added, None)) is not None:
            last = self._added + len(ready_ND)
            self.out_TD.index_add_(0, self.rows_N[self._added : last], ready_ND)
            self._added = last


class CachedPlane:
    """name: of the worker, for its spans. What cannot be read ends the worker."""

    fatal = ChannelError
    stage = Stage.EXPERT
    is_engaged = False
    yields = overtakes = True

    def __init__(
        self,
        name: str,
        half: AttentionHalf,
        cache: ExpertCache,
        timeline: Timeline,
        clock: Clock,
        foresight: Foresight | None = None,
    ) -> None:
        """foresight: None: nothing is read ahead."""
        self._foresight = foresight
        self._foretold: dict[Whose, tuple[int, Ids]] = {}  # the next layer, and what it may want
        self._name = name
        self._cache = cache
        self._timeline = timeline
        self._clock = clock
        self._clamped = clamped_gate(half.spec)
        experts = half.spec.num_experts
        self._identity_E = local_index(list(range(experts)), experts)
        self._pending: list[CachedPending] = []
        self.copy_s = 0.0  # of a whole layer: none is copied

    def wake(self) -> None:
        self._cache.wake()

    def begin(self, key: TaskKey, hidden_TD: Tensor, routed: Routed, plan: Plan) -> CachedPending:
        pending = CachedPending(key, routed, self._identity_E)
        whose = key.batch, key.micro_batch
        pending.want = self._cache.want(key.layer, list(pending.pairs), key.priority, whose)
        self._pending.append(pending)
        if self._foresight is not None:
            self._look_ahead(whose, key.layer, hidden_TD, routed, self._foresight)
        return pending

    def _look_ahead(
        self, whose: Whose, layer: int, hidden_TD: Tensor, routed: Routed, foresight: Foresight
    ) -> None:
        """Has the likely experts of the next layer read while nothing that is wanted is missing."""
        expected = self._foretold.pop(whose, None)
        if expected is not None and expected[0] == layer:
            foresight.learn(layer, expected[1], routed.topk_ids_TK)
        following = foresight.next_layer(layer)
        if following is None:
            return
        foretold = foresight.route(layer, hidden_TD, routed)
        self._foretold[whose] = following, foretold
        if len(self._foretold) > _MOST_FORETOLD:  # of batches that were dropped while they attended
            self._forget(next(iter(self._foretold)))
        self._cache.hint(whose, following, foresight.guesses(following, foretold))

    def poll(self, timeout_s: float, *, idle: bool) -> bool:
        if timeout_s <= 0.0:
            return False  # what has come is complete without
        return self._wait(timeout_s) if self._pending else self._cache.wait(timeout_s)

    def _wait(self, timeout_s: float) -> bool:
        start_s, before_s = self._clock(), self._cache.traffic.waited_s
        came = self._cache.wait(timeout_s)
        end_s = self._clock()
        self._timeline.exposed_s += self._cache.traffic.waited_s - before_s
        self._timeline.add(TaskSpan(self._name, Stage.WAIT, start_s, end_s))
        return came

    def steps(
        self, hidden_TD: Tensor, pending: CachedPending, shared_TD: Tensor | None
    ) -> Steps[None]:
        want = pending.want
        while want.left:
            taken = self._cache.take(want, pending.pairs, RUN_PAIRS)
            if taken:
                self._run(pending, taken)
                self._cache.done(want, taken)
            else:
                self._wait(_LOOK_S)
            yield
        hidden_TD.add_(pending.out_TD)
        self._pending.remove(pending)
        if shared_TD is not None:
            hidden_TD.add_(shared_TD)

    def drop(self, pending: CachedPending) -> None:
        self._pending.remove(pending)
        self._cache.drop(pending.want)
        self._forget((pending.key.batch, pending.key.micro_batch))

    def _forget(self, whose: Whose) -> None:
        self._foretold.pop(whose, None)
        self._cache.forget_hints(whose)

    def _run(self, pending: CachedPending, taken: list[Taken]) -> None:
        first, counts = pending.first_of[taken[0].expert], [pending.pairs[e] for e, _ in taken]
        pairs = slice(first, first + sum(counts))
        products = [self._cache.products(slot) for _, slot in taken]
        weighted_ND = weighted_run(
            pending.x_TD.index_select(0, pending.rows_N[pairs]),
            [gate_up for gate_up, _ in products],
            [down for _, down in products],
            counts,
            pending.weights_N[pairs],
            self._clamped,
        )
        pending.add(first, weighted_ND)
