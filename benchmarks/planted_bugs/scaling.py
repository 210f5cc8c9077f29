"""Ranks that come and go with the load."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_CAPACITY = ("tests/property/test_capacity.py",)
_EXPERT_STAGE = ("tests/unit/planner/online/test_expert_stage.py",)
_GROWS = "planner/scheduling/prefill_scaling.py"
_GROWTH = ("tests/property/test_prefill_scaling.py",)
_SCALER = ("tests/unit/cluster/fleet/test_autoscaler.py",)
_COMES = ("tests/unit/cluster/routing/test_prefill_placer.py",)
_RANK_BY_RANK, _RESIZED = (
    "cluster/fleet/membership.py",
    ("tests/unit/cluster/fleet/test_resizing.py",),
)
_HANDED = ("tests/unit/cluster/routing/test_drained_ranks.py",)
_LEAVING = ("tests/unit/actors/ranks/test_rank_drain.py",)
_ROUTER = ("tests/property/test_router.py", "tests/unit/planner/routing/test_router.py")
_ROUTES = "planner/routing/router.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        "scaling: one goes as soon as its own fill is low",
        _GROWS,
        "self.fill * workers / others > config.down_fill",
        "self.fill > config.up_fill",
        _GROWTH,
    ),
    Bug(
        "scaling: decided before the mean has followed",
        _GROWS,
        "if now_s < self._settled_s:",
        "if False:",
        _GROWTH,
    ),
    Bug(
        "scaling: more than the most",
        _GROWS,
        "self.fill >= config.up_fill and workers < self._most",
        "self.fill >= config.up_fill",
        _GROWTH,
    ),
    Bug(
        "scaling: what was idle long ago counts",
        _GROWS,
        "self._seen_s = self._idle_since_s = None",
        "self._seen_s = None",
        _GROWTH,
    ),
    Bug(
        "scaling: stopped with requests open",
        _RANK_BY_RANK,
        'if status.notes.get("leaving") == LEFT or not status.healthy:',
        "if status.healthy:",
        _SCALER,
    ),
    Bug(
        "scaling: one that did not start keeps its room",
        _RANK_BY_RANK,
        "        give_back(place)\n        raise",
        "        raise",
        _SCALER,
    ),
    Bug(
        "scaling: one that goes is still sent to",
        _ROUTES,
        "if state.present and worker not in self._retired",
        "if state.present",
        _ROUTER,
    ),
    Bug(
        "scaling: one of an old number is never sent to",
        _ROUTES,
        "self._retired.discard(worker)",
        "pass",
        _COMES,
    ),
    Bug(
        "capacity: another expert rank leaves the others their experts",
        "planner/costs/cost_model.py",
        "stages.expert.beta_ms * by.token",
        "stages.expert.beta_ms",
        _CAPACITY,
    ),
    Bug(
        "capacity: launches are shared by no more tokens than now",
        "planner/online/capacity.py",
        "rows = max(1, math.floor(most))",
        "rows = 1",
        _CAPACITY,
    ),
    Bug(
        "capacity: idle ranks do not count",
        "planner/online/capacity.py",
        "share = inside_s / report.seconds / window_s / attention_ranks",
        "share = inside_s / report.seconds / window_s",
        _CAPACITY,
    ),
    Bug(
        "capacity: full batches are as quick by the FLOP as small ones",
        "planner/online/prefill_capacity.py",
        "return flops / _UNIT if self._curve is None else self._curve.at(flops)",
        "return flops / _UNIT",
        _CAPACITY,
    ),
    Bug(
        "capacity: beyond what was measured a batch takes no longer",
        "planner/online/prefill_capacity.py",
        "return last.ms * flops / last.flops",
        "return last.ms",
        _CAPACITY,
    ),
    Bug(
        "capacity: batches of which there is no time are timed as well",
        "actors/planning/calibration.py",
        "while tokens >= LEAST_TOKENS and _PASSES * last_s <= left_s:",
        "while tokens >= LEAST_TOKENS:",
        ("tests/unit/actors/planning/test_calibration.py",),
    ),
    Bug(
        "scaling: the launch's room is given back with one rank of it",
        _RANK_BY_RANK,
        "if place.is_its_own:",
        "if place.placed.requests or not place.is_its_own:",
        _RESIZED,
    ),
    Bug(
        "scaling: who has gone is replaced all the same",
        "cluster/fleet/rank_group.py",
        "if closing.is_set() or not self.has(lost):",
        "if closing.is_set():",
        _RESIZED,
    ),
    Bug(
        "scaling: a second change begins beside the first",
        "cluster/fleet/resizing.py",
        'if self._progress == "running":\n                raise',
        'if self._progress == "idle" and self._number:\n                raise',
        _RESIZED,
    ),
    Bug(
        "scaling: expert ranks go before their experts have moved",
        "cluster/fleet/resizing.py",
        "            place_experts(self._working, count, self._config, self._closing)\n",
        "            self._closing.wait(0.0)\n",
        _RESIZED,
    ),
    Bug(
        "scaling: what is handed over costs an attempt",
        "cluster/routing/pipeline_backend.py",
        "counts = is_its_own and (is_new or not has_others)",
        "counts = is_new or not has_others",
        _HANDED,
    ),
    Bug(
        "scaling: one that hands over and stays is never given up",
        "cluster/routing/pipeline_backend.py",
        " and client is not None and client.is_leaving",
        "",
        _HANDED,
    ),
    Bug(
        "scaling: one that has left the directory gets requests",
        "cluster/routing/least_work_placer.py",
        "            rank.serves = False\n",
        "            rank.serves = True\n",
        _HANDED,
    ),
    Bug(
        "scaling: a rank hands over before it says that it leaves",
        "actors/ranks/lifecycle.py",
        "            self._told_s = now_s\n            self._loop.say_leaving()\n",
        "            self._told_s = now_s\n",
        _LEAVING,
    ),
    Bug(
        "scaling: what is on its way to a rank that leaves is cut off",
        "actors/ranks/lifecycle.py",
        "if now_s - self._told_s >= ON_ITS_WAY_S:",
        "if now_s >= self._told_s:",
        _LEAVING,
    ),
    Bug(
        "scaling: an expert rank is let go with tokens under way to it",
        "actors/rebalance/expert_membership.py",
        "if set(in_use) <= {self.placement.generation}:",
        "if self._leaving:",
        ("tests/unit/actors/rebalance/test_expert_membership.py",),
    ),
    Bug(
        "scaling: the planner plans for as many as were launched",
        "cluster/fleet/planner_discovery.py",
        'planner.handle.call("resize", *size)',
        "pass",
        ("tests/unit/cluster/fleet/test_planner_discovery.py",),
    ),
    Bug(
        "capacity: each token of a call reads its experts anew",
        "planner/online/stages.py",
        "return self.call_ms + self.read_ms * _hit(x, self.hit_per_token) + self.token_ms * x",
        "return self.call_ms + self.read_ms * x + self.token_ms * x",
        _EXPERT_STAGE,
    ),
    Bug(
        "capacity: a machine is as quick as it ever was",
        "planner/online/stages.py",
        "if self._times is None or self._added % _SAMPLES_BETWEEN == 0:",
        "if self._times is None:",
        _EXPERT_STAGE,
    ),
    Bug(
        "capacity: logits are of each layer",
        "planner/online/stages.py",
        "return finish.alpha_ms / self._layers +",
        "return finish.alpha_ms +",
        ("tests/unit/planner/online/test_micro_batch_stage.py",),
    ),
    Bug(
        "capacity: nothing lies between batches",
        "planner/online/planner.py",
        "max(0.0, line.at(ms)) + between.at(sequences),",
        "max(0.0, line.at(ms)),",
        _CAPACITY,
    ),
    Bug(
        "capacity: plans in use are the best ones",
        "planner/online/capacity.py",
        "return max(1.0, theirs_ms / best_ms) if best_ms > 0 else 1.0",
        "return 1.0",
        _CAPACITY,
    ),
    Bug(
        "capacity: packets of all attention ranks are one call",
        "planner/online/models.py",
        "Linear(attention_ranks * stages.expert.alpha_ms,",
        "Linear(stages.expert.alpha_ms,",
        _CAPACITY,
    ),
    Bug(
        "capacity: what a batch took itself lies between it and the one before",
        "actors/planning/rank_planning.py",
        "between_ms=max(0.0, running.took_ms - measured_ms),",
        "between_ms=running.took_ms,",
        ("tests/unit/actors/planning/test_rank_planning.py",),
    ),
    Bug(
        "capacity: a further expert rank needs no packet",
        "planner/online/stages.py",
        "token_ms = max(0.0, more) * _BOTH_WAYS * send.beta_ms",
        "token_ms = 0.0 * send.beta_ms",
        ("tests/unit/planner/online/test_micro_batch_stage.py",),
    ),
    Bug(
        "scaling: a launcher that takes over does not go on",
        "cluster/fleet/resizing.py",
        "            self._begin(state.wanted.counts)\n",
        "            self._begin({})\n",
        _RESIZED,
    ),
    Bug(
        "scaling: a change that ends its launcher ends one after the other",
        "cluster/fleet/resizing.py",
        "if self._resumed > MOST_RESUMED:",
        "if self._resumed < 0:",
        _RESIZED,
    ),
    Bug(
        "scaling: what another launcher had half started stays",
        "cluster/fleet/adoption.py",
        "            end_remnants(ledger.application, record.names)\n",
        "",
        ("tests/unit/cluster/fleet/test_adoption.py",),
    ),
    Bug(
        "scaling: who is leaving is not written down",
        "cluster/fleet/fleet_store.py",
        "leaving = [one for one in group.leaving if one not in ranks]",
        "leaving = list[Member]()",
        ("tests/unit/cluster/fleet/test_adoption.py",),
    ),
    Bug(
        "scaling: the planner learns a group of another size from nothing",
        "planner/online/planner.py",
        "        if before and setup.refit:\n",
        "        if before and not setup.refit:\n",
        ("tests/unit/planner/online/test_resized_models.py",),
    ),
    Bug(
        "scaling: experts of fewer ranks take as long as before",
        "planner/online/models.py",
        "before._expert.resized(by.call, by.token)",
        "before._expert.resized(1.0, 1.0)",
        ("tests/unit/planner/online/test_resized_models.py",),
    ),
)
