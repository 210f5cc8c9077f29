"""Ranks that come and go with the load."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_CAPACITY = ("tests/property/test_capacity.py",)
_GROWS = "planner/policies/scaling.py"
_GROWTH = ("tests/property/test_scaling.py",)
_SCALER = ("tests/unit/cluster/fleet/test_scaler.py",)
_COMES = ("tests/unit/cluster/routing/test_prefill_backlog.py",)
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
        "cluster/fleet/scaler.py",
        "if is_idle and time.monotonic() >= since_s + TOLD_S:",
        "if time.monotonic() >= since_s + TOLD_S:",
        _SCALER,
    ),
    Bug(
        "scaling: one that did not start keeps its room",
        "cluster/fleet/scaler.py",
        "            placed.release()\n            raise",
        "            raise",
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
        "planner/costs/resized.py",
        "stages.expert.beta_ms * pairs",
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
)
