"""Which rank takes a request, and when."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_ROUTER = ("tests/property/test_router.py", "tests/unit/planner/routing/test_router.py")
_PROMISES = ("tests/property/test_pending_blocks.py", "tests/property/test_router.py")
_JOURNAL = ("tests/unit/actors/ranks/test_worker_log.py",)
_DOOR = "cluster/routing/admission_controller.py"
_LATER = "planner/scheduling/retry_reservations.py"
_DOORS = (
    "tests/unit/cluster/routing/test_admission_controller.py",
    "tests/unit/planner/scheduling/test_drain_rate.py",
)
_APPOINTMENTS = ("tests/unit/planner/scheduling/test_retry_reservations.py",)
_ROUTES = "planner/routing/router.py"
_STATE = "planner/routing/worker_state.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        "router: a saturated worker is taken",
        "planner/routing/route_policies.py",
        "if candidate.queued < candidate.threshold]",
        "if candidate.queued <= candidate.threshold]",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: the shortest match is taken",
        "planner/routing/route_policies.py",
        "    return -candidate.matched_blocks, load, candidate.worker\n",
        "    return candidate.matched_blocks, load, candidate.worker\n",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: what an ended request promised stays",
        _ROUTES,
        "        for prompt in ended:\n            self._pending.remove(worker, prompt.hashes)\n",
        "",
        _ROUTER,
    ),
    Bug(
        "router: an accepted request counts twice",
        _ROUTES,
        "            if key in self._own[worker]:\n                self.withdraw(key)\n",
        "            pass\n",
        _ROUTER,
    ),
    Bug(
        "router: only committed blocks are matched",
        _ROUTES,
        "return max(committed, self._pending.match(worker, prompt.hashes))",
        "return committed",
        (*_ROUTER, "tests/property/test_backlog.py"),
    ),
    Bug(
        "router: a promise ends with the first of two that made it",
        "planner/routing/pending_blocks.py",
        "            if run.workers[worker] == 0:\n                self._drop(run, worker)\n",
        "            self._drop(run, worker)\n",
        _PROMISES,
    ),
    Bug(
        "door: both classes have one queue",
        _DOOR,
        "{priority: _Half(slots, config) for priority in Priority}",
        "dict.fromkeys(Priority, _Half(slots, config))",
        _DOORS,
    ),
    Bug(
        "door: BE may wait for what all the ranks can do",
        _DOOR,
        "            share, longest_s = config.be_share, config.be_max_wait_s\n",
        "            share, longest_s = 1.0, config.be_max_wait_s\n",
        _DOORS,
    ),
    Bug(
        "door: all are told to come at the same time",
        _DOOR,
        "wait_s = retry_after_s(excess / PROMISED, rate)",
        "wait_s = retry_after_s(half.tokens_each, rate)",
        _DOORS,
    ),
    Bug(
        "door: who comes when he was told is no better off than others",
        _DOOR,
        "0.0 if early_s == 0 else half",
        "half",
        _DOORS,
    ),
    Bug(
        "door: one tenant's promises are before everybody",
        _LATER,
        "turns = min(length, most)",
        "turns = length",
        _APPOINTMENTS,
    ),
    Bug(
        "door: each newcomer walks over all tenants that were promised something",
        _LATER,
        "whose = next(iter(self._equals[max(self._equals)].tenants))",
        "whose = max(self._lines, key=lambda one: len(self._lines[one].requests))",
        _APPOINTMENTS,
    ),
    Bug(
        "door: a tenant whose line grows is still counted among the shorter ones",
        _LATER,
        "        equals.amount -= line.amount\n",
        "",
        _APPOINTMENTS,
    ),
    Bug(
        "journal: a report of an epoch that is closed is folded",
        _STATE,
        "return epoch <= self._closed_epoch or (epoch, number) <= (self.epoch, self.number)",
        "return (epoch, number) <= (self.epoch, self.number)",
        ("tests/unit/planner/routing/test_worker_state.py",),
    ),
    Bug(
        "journal: a gap in the reports is not noticed",
        _STATE,
        "if (report.epoch, report.number) != (self.epoch, self.number + 1):",
        "if report.epoch != self.epoch:",
        ("tests/unit/planner/routing/test_worker_state.py",),
    ),
    Bug(
        "journal: evicted blocks stay committed",
        _STATE,
        "            self._committed.pop(digest, None)\n",
        "            pass\n",
        (*_ROUTER, *_JOURNAL),
    ),
    Bug(
        "journal: stored and evicted are swapped",
        "actors/ranks/worker_log.py",
        "self._cache.update(dict.fromkeys(digests, False))",
        "self._cache.update(dict.fromkeys(digests, True))",
        _JOURNAL,
    ),
    Bug(
        "journal: an ended request stays open",
        "actors/ranks/worker_log.py",
        "        self._open.remove(key)\n",
        "",
        _JOURNAL,
    ),
    Bug(
        "journal: all tokens of a prompt can be cached",
        _STATE,
        "return min(blocks, (prompt.prompt_tokens - 1) // block_tokens) * block_tokens",
        "return min(blocks, prompt.prompt_tokens // block_tokens) * block_tokens",
        (*_ROUTER, *_JOURNAL),
    ),
)
