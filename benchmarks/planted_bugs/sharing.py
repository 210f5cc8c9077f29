"""What each class and each sequence gets of a rank, by whose policy."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_SHARES = ("tests/property/test_share_credit.py",)
_CHOICE = ("tests/unit/planner/scheduling/test_preemption.py",)
_USER = "planner/scheduling/user_policy.py"
_SHARE = "planner/scheduling/preemption.py"
_PREEMPTION = "planner/scheduling/preemption.py"
_OWN = ("tests/unit/planner/scheduling/test_user_policy.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "shares: no credit while LS runs",
        _PREEMPTION,
        "        if self._be_waits:\n",
        "        if self._holding:\n",
        _SHARES,
    ),
    Bug(
        "shares: the clamp is the wrong way round",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "min(self.credit_s - charge, -charge)",
        _SHARES,
    ),
    Bug(
        "shares: what BE had for nothing is held against it for ever",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "self.credit_s - charge",
        _SHARES,
    ),
    Bug(
        "shares: a slice costs no credit that is not there",
        _SHARE,
        "max(self.credit_s - charge, -charge)",
        "max(self.credit_s - charge, 0.0)",
        _SHARES,
    ),
    Bug(
        "shares: to hold counts as service",
        _PREEMPTION,
        "            self._holding = True\n",
        "            self._holding, self._be_waits = True, False\n",
        _SHARES,
    ),
    Bug(
        "shares: BE is held although it is owed",
        _PREEMPTION,
        "if first is not None and self._floor.is_owed:",
        "if mine and first is not None and self._floor.is_owed:",
        _SHARES,
    ),
    Bug(
        "shares: BE goes first without credit",
        _SHARE,
        "return self.credit_s > 0.0",
        "return self.credit_s >= 0.0",
        _SHARES,
    ),
    Bug(
        "shares: credit grows while BE is not there",
        _PREEMPTION,
        "        self._be_waits = False\n        mine",
        "        mine",
        _SHARES,
    ),
    Bug(
        "shares: dropped work is owed the idle time after it",
        _PREEMPTION,
        "        self._be_waits = self._holding = False\n\n    def _pass_time",
        "        pass\n\n    def _pass_time",
        _CHOICE,
    ),
    Bug(
        "shares: a second task of BE begins",
        _PREEMPTION,
        "[work for work in others if work.begun] or others",
        "others",
        _CHOICE,
    ),
    Bug(
        "user policy: a failure does not count",
        _USER,
        "        self.failures += 1\n",
        "",
        _OWN,
    ),
    Bug(
        "user policy: what it gives is not looked at",
        _USER,
        "        if not self._is_one(given, result):\n",
        "        if False:\n",
        _OWN,
    ),
    Bug(
        "user policy: it may let everything wait for ever",
        _USER,
        "        elif now_s - self._held_since_s > HELD_S:\n",
        "        elif False:\n",
        _OWN,
    ),
)
