"""The processes of roles before and after a fault, and what is wrong with them. Pure.

A launcher adopts ranks by the records of another one. Wrong: a surviving rank is another process, a
second process has its name, or a replacement has an epoch that was in use before.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Places(NamedTuple):
    """pids: by role. others: processes of a name that another one has. epochs: of ranks, as they
    say themselves, if all of them did."""

    pids: Mapping[str, int]
    others: int
    epochs: Mapping[str, int]


def not_adopted(before: Places, now: Places) -> list[str]:
    """What another launcher has not taken over, though it lives."""
    nobodys = ("ingress", "launcher", "raylet")
    ranks = [role for role in before.pids if not role.startswith(nobodys)]
    suffix = "after its launcher was killed"
    found = [
        f"{role} was another process {suffix}"
        for role in ranks
        if now.pids.get(role) != before.pids[role]
    ]
    more = now.others - before.others
    return [*found, f"{more} more ranks of one name {suffix}"] if more > 0 else found


def not_newer(before: Places, now: Places) -> list[str]:
    """Ranks that took a place under an epoch that there was before in their group."""
    highest = max(before.epochs.values(), default=0)
    return [
        f"{name} was replaced under epoch {epoch}, and {highest} was there before"
        for name, epoch in now.epochs.items()
        if name in before.pids and now.pids.get(name) != before.pids[name] and epoch <= highest
    ]
