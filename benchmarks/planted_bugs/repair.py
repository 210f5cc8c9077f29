"""Ranks that are lost, and what of them goes on."""

from __future__ import annotations

from benchmarks.planted_bugs.bug import Bug

_ADOPTION = ("tests/unit/cluster/fleet/test_adoption.py",)
_ENDS = ("tests/property/test_ends.py",)
_GOING_ON = ("tests/property/test_going_on.py",)
_PENDING = "actors/experts/remote_pending.py"
_AGAIN = ("tests/unit/actors/experts/test_remote_pending.py",)
_RANK_GROUP = ("tests/unit/cluster/fleet/test_rank_group.py",)
_WANTED, _WANTING = "actors/experts/wanted.py", ("tests/property/test_wanted.py",)
_ATTENDANCE = ("tests/unit/actors/experts/test_attendance.py",)

BUGS: tuple[Bug, ...] = (
    Bug(
        "repair: a rank that has been replaced is taken back",
        "actors/channels/joiner.py",
        "if epoch < newest:",
        "if epoch < 0:",
        ("tests/unit/actors/channels/test_links.py",),
    ),
    Bug(
        "repair: a later epoch does not take the place of the one before",
        "actors/channels/endpoint.py",
        "return link is not None and link.epoch >= epoch",
        "return link is not None",
        ("tests/unit/actors/channels/test_links.py",),
    ),
    Bug(
        "repair: what a lost rank has not answered is not sent again",
        _PENDING,
        "            if piece.rank == rank:\n                self.hold(piece)",
        "            if piece.rank == rank:\n                continue",
        _AGAIN,
    ),
    Bug(
        "repair: what was answered is asked for again",
        _PENDING,
        "if reply not in self.replies and not (",
        "if not (",
        _AGAIN,
    ),
    Bug(
        "repair: what is cut anew answers for another part of its token group",
        "actors/experts/resend.py",
        "first_group + len(slices),",
        "piece.token_group,",
        _AGAIN,
    ),
    Bug(
        "repair: local experts are those of another placement",
        "actors/experts/resend.py",
        "low, high = before.bounds[piece.rank]",
        "low, high = placed.bounds[piece.rank]",
        ("tests/property/test_stand_in.py",),
    ),
    Bug(
        "repair: half of the attention ranks have an expert rank killed that the others have",
        "cluster/fleet/repair.py",
        "2 * told[name] > asked",
        "2 * told[name] >= asked",
        ("tests/unit/cluster/fleet/test_missed_ranks.py",),
    ),
    Bug(
        "repair: an expert rank that most have lost is killed before it can join again",
        "cluster/fleet/repair.py",
        "MOST_S = 1.0",
        "MOST_S = 0.0",
        ("tests/unit/cluster/fleet/test_missed_ranks.py",),
    ),
    Bug(
        "repair: who stands in is used before all have said that they do",
        "actors/experts/attendance.py",
        "all(self.can(e, wanted) for e in present)",
        "any(self.can(e, wanted) for e in present)",
        _ATTENDANCE,
    ),
    Bug(
        "repair: who stands in is left while something under way needs it",
        "actors/experts/attendance.py",
        "if generation not in in_use:",
        "if generation:",
        _ATTENDANCE,
    ),
    Bug(
        "going on: draws begin anew on the rank that goes on",
        "actors/batching/sampler.py",
        "uniform(sequence.seed, sequence.generated)",
        "uniform(sequence.seed, len(sequence.token_ids) - len(sequence.submit.token_ids))",
        _GOING_ON,
    ),
    Bug(
        "going on: penalties and choices forget what another rank has generated",
        "actors/batching/logit_rules.py",
        "self._noted = submit.prompt_tokens",
        "self._noted = len(submit.token_ids)",
        _GOING_ON,
    ),
    Bug(
        "going on: the tokens that came after the first loss are not counted as generated",
        "cluster/routing/ticket.py",
        "generated=self.submit.generated + len(self._tokens)",
        "generated=self.submit.generated or len(self._tokens)",
        _GOING_ON,
    ),
    Bug(
        "going on: ranks go on asking a planner that is lost",
        "cluster/fleet/told_planner.py",
        "if self._told.get(member.name) != now:",
        "if member.name not in self._told:",
        ("tests/unit/cluster/fleet/test_told_planner.py",),
    ),
    Bug(
        "going on: a choice that is complete goes on",
        "cluster/routing/endings.py",
        "return way.at_end",
        "return False",
        _GOING_ON,
    ),
    Bug(
        "going on: one look that finds no sequence is enough",
        "cluster/serving/serve_end.py",
        "if (was_idle and not left) or",
        "if not left or",
        ("tests/unit/cluster/serving/test_serve_end.py",),
    ),
    Bug(
        "repair: a token makes up for every lost rank before it",
        "cluster/routing/ticket.py",
        "if given - self._forgiven_at >= forgiving_tokens:",
        "if given > self._forgiven_at:",
        _ENDS,
    ),
    Bug(
        "repair: tokens make up for no lost rank",
        "cluster/routing/ticket.py",
        "self.attempts, self._forgiven_at = 0, given",
        "self._forgiven_at = given",
        _ENDS,
    ),
    Bug(
        "adoption: ranks of another launch are taken over",
        "cluster/fleet/ledger.py",
        "fits = (record.launch_id, record.config) == (self.launch_id, self.config_digest)",
        "fits = record.config == self.config_digest",
        _ADOPTION,
    ),
    Bug(
        "adoption: nobody asks who a rank is",
        "cluster/fleet/adoption.py",
        "if found is not None and tuple(found) != expected:",
        "if found is not None and found[0] != member.name:",
        _ADOPTION,
    ),
    Bug(
        "adoption: what is deployed anew ends the ranks that still answer",
        "cluster/fleet/adoption.py",
        "        if record.is_ending:\n",
        "        if False:\n",
        _ADOPTION,
    ),
    Bug(
        "adoption: a launcher that ends forgets the next one's ledger",
        "cluster/fleet/ledger.py",
        "if record is None or record.writer == self._writer:",
        "if True:",
        _ADOPTION,
    ),
    Bug(
        "adoption: whoever has a launcher's pid is that launcher",
        "actors/channels/neighbour.py",
        "    if process.started == said.started:\n",
        "    if True:\n",
        _ADOPTION,
    ),
    Bug(
        "adoption: a rank that was replaced is not written down",
        "cluster/fleet/ledger.py",
        "if body != self._written and",
        "if not self._written and",
        _ADOPTION,
    ),
    Bug(
        "repair: nobody comes after a replacement that was lost while it loaded",
        "cluster/fleet/supervisor.py",
        "            self._closing.wait(retry_s)\n",
        "            return\n",
        _RANK_GROUP,
    ),
    Bug(
        "repair: what did not start stays where it is",
        "cluster/fleet/rank_group.py",
        "        except BaseException as error:\n            kill_all(handles)\n",
        "        except BaseException as error:\n",
        _RANK_GROUP,
    ),
    Bug(
        "repair: what one class has left is let go of",
        _WANTED,
        "if any(owed.values()):",
        "if owed[priority]:",
        _WANTING,
    ),
    Bug(
        "repair: who leaves before its wish is heard has never left",
        _WANTED,
        "        owed[priority] -= 1\n",
        "        owed[priority] -= owed[priority] > 0\n",
        _WANTING,
    ),
    Bug(
        "repair: what waits to be read is read again for the next that wants it",
        _WANTED,
        "if generation != self.loading and generation not in self._waiting:",
        "if generation != self.loading:",
        _WANTING,
    ),
    Bug(
        "repair: what one rank leaves is let go of for all",
        _WANTED,
        "if not self._by[generation]:",
        "if True:",
        _WANTING,
    ),
    Bug(
        "repair: what nobody wants any more stays the one that is read",
        _WANTED,
        "                if generation == self.loading:\n                    self.loading = None\n",
        "",
        _WANTING,
    ),
    Bug(
        "repair: a rank that is lost needs what it wanted",
        _WANTED,
        "return self._without(name, list(self._by))",
        "return self._without(name, [])",
        _WANTING,
    ),
    Bug(
        "repair: what is retired in one class is retired",
        _WANTED,
        "used_from = min(newest.values())",
        "used_from = max(newest.values())",
        _WANTING,
    ),
    Bug(
        "repair: an answer says the first attempt, not the one that it answers",
        _WANTED,
        "self._by.setdefault(generation, {})[name] = attempt",
        "self._by.setdefault(generation, {}).setdefault(name, attempt)",
        _WANTING,
    ),
    Bug(
        "repair: a late answer to what was left is taken for the next one",
        "actors/experts/attendance.py",
        "elif attempt == self._asked[expert].get(generation):",
        "elif generation in self._asked[expert]:",
        _ATTENDANCE,
    ),
    Bug(
        "repair: a rank may leave without end what it never wanted",
        _WANTED,
        "        self._check_count(name, owed, generation)\n",
        "",
        _WANTING,
    ),
)
