"""Where ranks are told that their planner is."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.fleet.member import Member
from cluster.fleet.rank_group import RankGroup
from contracts.worker import Group


class ToldPlanner:
    """By the supervisor, round by round: whoever takes a lost planner's place is elsewhere. Ranks
    run under default plans until they have found it. To be made of ranks that have been told."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._planners = [group for group in groups if group.kind is Group.PLANNER]
        self._asking = [group for group in groups if group.kind in (Group.ATTENTION, Group.EXPERT)]
        address = self._address
        self._told = {member.name: (member.ready.pid, address) for member in self._members}

    def update(self) -> None:
        """Tells those that have not been told so, and waits for nobody."""
        address = self._address
        for member in self._members if address else ():
            now = member.ready.pid, address
            if self._told.get(member.name) != now:
                self._told[member.name] = now
                member.handle.call("join_planner", address)

    @property
    def _address(self) -> str:
        """Empty while there is none."""
        members = [member for group in self._planners for member in group.members]
        return next((one.ready.channel_address for one in members if not one.replaced_for), "")

    @property
    def _members(self) -> list[Member]:
        members = [member for group in self._asking for member in group.members]
        return [member for member in members if not member.replaced_for]
