"""Notification of ranks about their planner, and of the planner about their number."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from contracts.ranks import Group


class PlannerDiscovery:
    """Called each round by the supervisor, because a replacement planner has another address.

    Without a planner ranks use default plans. Assumes that the initial ranks have been notified.
    """

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._planners = [group for group in groups if group.kind is Group.PLANNER]
        self._clients = [group for group in groups if group.kind in (Group.ATTENTION, Group.EXPERT)]
        address = self._address
        self._notified = {member.name: (member.ready.pid, address) for member in self._members}
        self._sizes: dict[int, tuple[int, int]] = {}  # size of the group by planner process

    def update(self) -> None:
        """Notify the ranks that lack the current address, without waiting."""
        address = self._address
        for member in self._members if address else ():
            now = member.ready.pid, address
            if self._notified.get(member.name) != now:
                self._notified[member.name] = now
                member.handle.call("join_planner", address)
        for group in self._clients:
            self._update_size(group)

    def _update_size(self, group: RankGroup) -> None:
        """Write the number of ranks into the specs, for replacements."""
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
        """Return the planner's address, empty if there is none."""
        members = [member for group in self._planners for member in group.members]
        return next(
            (one.ready.channel_address for one in members if not one.replacement_reason), ""
        )

    @property
    def _members(self) -> list[Member]:
        members = [member for group in self._clients for member in group.members]
        return [member for member in members if not member.replacement_reason]
