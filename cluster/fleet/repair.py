"""What is done about ranks that are of no use: a policy for each group. Pure: no Ray, no clock.

prefill workers             replace_each   another in the place of each that is lost
prefill workers, all_to_all rebuild        they work in lockstep or not at all: all start again
attention and expert ranks  repair         replace_each; one that nobody replaces ends the server
planner                     replace_each   ranks go on with default plans, until they are told of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from contracts.config import TandemConfig
from contracts.ranks import Group


class GroupHealth(NamedTuple):
    """names: of all its ranks. problems: why those that are not being replaced already are of no
    use, by name; replaced: why the others are. out_s: for how long the place of the one that has
    been out longest has had nobody of use, without a break."""

    names: Sequence[str]
    problems: Mapping[str, str]
    unavailable_s: float
    replaced: Mapping[str, str] = {}


class Replace(NamedTuple):
    """Other processes in the places of `names`, under one new epoch. lost: who is the reason."""

    names: Sequence[str]
    lost: str
    reason: str


class GiveUp(NamedTuple):
    """The group can serve no more: which ranks keep it from serving, and why."""

    reason: str


Action = Replace | GiveUp

MAJORITY_TIMEOUT_S = 1.0  # for so long most of them must miss it: it is introduced again meanwhile
TIE_TIMEOUT_S = (
    10.0  # for so long half of them may miss one that the others have: it may be a link's fault
)
Policy = Callable[[GroupHealth], Sequence[Action]]


def repair_policy(group: Group, config: TandemConfig) -> Policy:
    """Of the group that this kind of rank belongs to."""
    if group in (Group.ATTENTION, Group.EXPERT):
        return partial(repair, within_s=config.groups.recovery_timeout_s)
    in_lockstep = group is Group.PREFILL and config.prefill.experts == "all_to_all"
    return rebuild if in_lockstep else replace_each


def most_missed(
    reports: Mapping[str, int], num_reporters: int, since_s: Mapping[str, float], now_s: float
) -> tuple[list[str], dict[str, float]]:
    """Expert ranks that most attention ranks miss for MOST_S, or half of them for TIE_S; and since
    when half of them or more have missed each, to be given back the next time. told: by how many of
    those that were asked."""
    half = {
        name: since_s.get(name, now_s)
        for name, count in reports.items()
        if 2 * count >= num_reporters
    }
    limits_s = {
        name: MAJORITY_TIMEOUT_S if 2 * reports[name] > num_reporters else TIE_TIMEOUT_S
        for name in half
    }
    most = [name for name, at_s in half.items() if now_s - at_s >= limits_s[name]]
    return most, half


def replace_each(health: GroupHealth) -> Sequence[Action]:
    return [Replace([name], name, reason) for name, reason in health.problems.items()]


def rebuild(health: GroupHealth) -> Sequence[Action]:
    """One loss is that of all: none of them keeps its process."""
    first = next(iter(health.problems.items()), None)
    return [] if first is None else [Replace(health.names, *first)]


def repair(health: GroupHealth, *, within_s: float) -> Sequence[Action]:
    """Others stand in for a lost one, or wait for another in its place, which may take so long."""
    replacing = replace_each(health)
    if health.unavailable_s < within_s:
        return replacing
    problems = {**health.replaced, **health.problems}
    reports = [why if name in why else f"{name}: {why}" for name, why in problems.items()]
    return [*replacing, GiveUp("; ".join(reports))]
