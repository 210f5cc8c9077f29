"""Where ranks are told that their planner is, and the planner how many they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from contracts.ranks import Group


class PlannerDiscovery:
    """By the supervisor, round by round: whoever takes a lost planner's place is elsewhere, and
    ranks come and go. Ranks run under default plans until they have found it. To be made of ranks
    that have been told."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._planners = [group for group in groups if group.kind is Group.PLANNER]
        self._clients = [group for group in groups if group.kind in (Group.ATTENTION, Group.EXPERT)]
        address = self._address
        self._notified = {member.name: (member.ready.pid, address) for member in self._members}
        self._sizes: dict[int, tuple[int, int]] = {}  # of the group, by the planner's process

    def update(self) -> None:
        """Tells those that have not been told so, and waits for nobody."""
        address = self._address
        for member in self._members if address else ():
            now = member.ready.pid, address
            if self._notified.get(member.name) != now:
                self._notified[member.name] = now
                member.handle.call("join_planner", address)
        for group in self._clients:
            self._update_size(group)

    def _update_size(self, group: RankGroup) -> None:
        """Specs say how many ranks there are, for whoever takes a place."""
        size = len(group.of_kind(Group.ATTENTION)), len(group.of_kind(Group.EXPERT))
        planners = [member for one in self._planners for member in one.members]
        for planner in planners:
            made_for = planner.spec.attention_ranks, planner.spec.expert_ranks
            if self._sizes.setdefault(planner.ready.pid, made_for) != size:
                self._sizes[planner.ready.pid] = size
                planner.handle.call("resize", *size)
        attention, expert = size
        for member in (*group.members, *planners):
            if (member.spec.attention_ranks, member.spec.expert_ranks) != size:
                member.spec = msgspec.structs.replace(
                    member.spec, attention_ranks=attention, expert_ranks=expert
                )

    @property
    def _address(self) -> str:
        """Empty while there is none."""
        members = [member for group in self._planners for member in group.members]
        return next(
            (one.ready.channel_address for one in members if not one.replacement_reason), ""
        )

    @property
    def _members(self) -> list[Member]:
        members = [member for group in self._clients for member in group.members]
        return [member for member in members if not member.replacement_reason]
