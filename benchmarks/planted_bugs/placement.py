"""Which rank holds which experts, and how that changes while ranks serve."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_GENERATIONS = "actors/rebalance/expert_generations.py"
_SWITCHING = "actors/rebalance/placement_transition.py"
_FOLLOWING = ("tests/property/test_generations.py",)
_FOLLOWER = "planner/placement/rebalance_policy.py"
_FOLLOWER_TESTS = ("tests/unit/planner/placement/test_rebalance_policy.py",)
_RESIZED = ("tests/property/test_placement_resize.py",)
_RESIZING = ("tests/unit/actors/rebalance/test_placement_transition.py",)
_PLACED = (
    "tests/property/test_placement_solver.py",
    "tests/unit/planner/placement/test_solve.py",
)

BUGS: tuple[Bug, ...] = (
    Bug(
        "placement: a PLACED that crossed a refusal counts",
        _SWITCHING,
        "if attempt != candidate.attempt:",
        "if False:",
        _FOLLOWING,
    ),
    Bug(
        "placement: freed when one class has nothing more to come",
        _GENERATIONS,
        "return min(self.retired.values()) >= generation",
        "return max(self.retired.values()) >= generation",
        _FOLLOWING,
    ),
    Bug(
        "placement: freed when one attention rank refuses",
        _GENERATIONS,
        "if all(peer.refused for peer in peers):",
        "if any(peer.refused for peer in peers):",
        _FOLLOWING,
    ),
    Bug(
        "placement: retired while something older is under way",
        _SWITCHING,
        "if not self._owes_retired or any(older < self.generation for older in self._live):",
        "if not self._owes_retired:",
        _FOLLOWING,
    ),
    Bug(
        "placement: a refusal that came before the proposal is forgotten",
        _GENERATIONS,
        "peer.unborn = max(peer.unborn, generation)",
        "pass",
        _FOLLOWING,
    ),
    Bug(
        "placement: gone over to before all have it",
        _SWITCHING,
        "if not needed <= candidate.placed | candidate.excused:",
        "if not candidate.placed | candidate.excused:",
        _FOLLOWING,
    ),
    Bug(
        "placement: withdrawn after it was placed",
        _GENERATIONS,
        "loading = self._next is not None and self._next.stage is Stage.LOADING\n        return",
        "loading = self._next is not None\n        return",
        _FOLLOWING,
    ),
    Bug(
        "placement: who refused is not told that others use it",
        _GENERATIONS,
        "if not any(peer.uses(generation) for peer in peers):",
        "if True:",
        _FOLLOWING,
    ),
    Bug(
        "placement: a lost attention rank is waited for",
        _GENERATIONS,
        "if self._peers.pop(name, None) is None or self._next is None:",
        "if self._peers.get(name) is None or self._next is None:",
        _FOLLOWING,
    ),
    Bug(
        "placement: experts go back and forth with the traffic",
        _FOLLOWER,
        "return LEAST_GAIN * math.exp2(",
        "return LEAST_GAIN * 0 * (",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: what hurts the older half of the window is moved",
        _FOLLOWER,
        "if min(saved) < 0:",
        "if False:",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: experts move by traffic of before a turn and after it",
        _FOLLOWER,
        "now_s < self._not_before_s or routing.is_turning",
        "now_s < self._not_before_s",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: what moved by traffic of before a turn rests",
        _FOLLOWER,
        "and not is_of_before:",
        "and True:",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: kinds of traffic in quick turns are a turn",
        "planner/placement/routing_window.py",
        "if found is None or any(_place(",
        "if found is None or any(() and _place(",
        ("tests/unit/planner/placement/test_traffic_shift.py",),
    ),
    Bug(
        "placement: one strange second is a turn",
        "planner/placement/routing_window.py",
        "return at + 1 if _is_clean(shares_BN, at + 1) else None",
        "return at + 1",
        ("tests/unit/planner/placement/test_traffic_shift.py",),
    ),
    Bug(
        "placement: a move brings in more than it may",
        _FOLLOWER,
        "if max(loads) <= most:",
        "if True:",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: a planner that begins anew uses a number again",
        _FOLLOWER,
        "self.newest = max(self.newest, newest, placement.generation)",
        "pass",
        _FOLLOWER_TESTS,
    ),
    Bug(
        "placement: the mean stands for layers that differ",
        "planner/schedule/deployment_search.py",
        "for stages in layers or (spec.stages,) * spec.num_layers",
        "for stages in (spec.stages,) * spec.num_layers",
        ("tests/unit/planner/schedule/test_placed_routing.py",),
    ),
    Bug(
        "placement: tokens that go to both of two experts count as if they came apart",
        "planner/placement/search.py",
        " - sums.leave_S[:, None] + sums.beside_SS",
        " - sums.leave_S[:, None]",
        _PLACED,
    ),
    Bug(
        "placement: an expert comes to a rank that has it",
        "planner/placement/search.py",
        "barred_SS |= there_SS | there_SS.T | empty_S[:, None] | empty_S",
        "barred_SS |= empty_S[:, None] | empty_S",
        _PLACED,
    ),
    Bug(
        "placement: what is worse on tokens kept out is taken",
        "planner/placement/solve.py",
        "if not tokens or price_now >= price_was * (1 - moves * costs.move):",
        "if not tokens:",
        _PLACED,
    ),
    Bug(
        "placement: a change taken back leaves the sums as they were with it",
        "planner/placement/layout.py",
        "        self.sums = undo.sums\n",
        "",
        _PLACED,
    ),
    Bug(
        "placement: more experts move than may",
        "planner/placement/search.py",
        "        barred_SS |= moves_SS > layout.homes.most_moves\n",
        "",
        _PLACED,
    ),
    Bug(
        "placement: a file for another tokenizer is read",
        "cluster/fleet/placements.py",
        "if written != digest.hex()",
        'if written != digest.hex() and name != "tokenizer"',
        ("tests/unit/cluster/fleet/test_placement_file.py",),
    ),
    Bug(
        "resizing: gone over to without the rank that comes",
        _SWITCHING,
        "return set(_experts(max(self.current.ranks, ranks)))",
        "return set(_experts(self.current.ranks))",
        _FOLLOWING,
    ),
    Bug(
        "resizing: whoever goes is not asked whether it has nothing more to answer",
        _SWITCHING,
        "return set(_experts(max(self.current.ranks, ranks)))",
        "return set(_experts(ranks))",
        _RESIZING,
    ),
    Bug(
        "resizing: one whose link comes after a refusal waits for ever",
        _SWITCHING,
        "if candidate.refused:\n                return [self._refusal(generation, expert)]",
        "if candidate.refused:\n                return []",
        (*_FOLLOWING, *_RESIZING),
    ),
    Bug(
        "resizing: what others have left behind is waited for",
        _GENERATIONS,
        "if proposed and peers and all(peer.is_through_with(generation) for peer in peers):",
        "if False:",
        _RESIZING,
    ),
    Bug(
        "resizing: a rank that has no part is missed",
        "actors/rebalance/expert_membership.py",
        "for expert in self.absent.keys() - set(experts):",
        "for expert in ():",
        ("tests/unit/actors/rebalance/test_expert_membership.py",),
    ),
    Bug(
        "resizing: what another has too is kept, and what nobody has is not",
        "planner/placement/resize.py",
        "while copies.total() - len(+copies) > spare and any(copies[one] > 1 for one in own):",
        "while False:",
        _RESIZED,
    ),
    Bug(
        "resizing: more experts move than must",
        "planner/placement/resize.py",
        "key=lambda rank: -had[rank] if rank < len(had) else 0)",
        "key=lambda rank: had[rank] if rank < len(had) else 0)",
        _RESIZED,
    ),
)
