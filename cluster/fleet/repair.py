"""Repair policies for groups with lost ranks. Pure: no Ray, no clock.

prefill workers             replace_each   replace each lost worker
prefill workers, all_to_all rebuild        workers run in lockstep: restart all
attention and expert ranks  repair         replace_each; end the server after the recovery timeout
planner                     replace_each   ranks use default plans meanwhile
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from contracts.config import TandemConfig
from contracts.ranks import Group


class GroupHealth(NamedTuple):
    """Health of a group.

    names: all ranks. problems: reason by name, of ranks that are not being replaced; replaced:
    reasons of the others. unavailable_s: how long the longest unavailable rank has been without a
    replacement.
    """

    names: Sequence[str]
    problems: Mapping[str, str]
    unavailable_s: float
    replaced: Mapping[str, str] = {}


class Replace(NamedTuple):
    """Replace the processes of `names` under one new epoch. lost: the rank that caused it."""

    names: Sequence[str]
    lost: str
    reason: str


class GiveUp(NamedTuple):
    """The group cannot serve any more. reason: the ranks and their problems."""

    reason: str


Action = Replace | GiveUp

MAJORITY_TIMEOUT_S = 1.0  # it is introduced again meanwhile
TIE_TIMEOUT_S = 10.0  # a link may be the cause if half of them reach it
Policy = Callable[[GroupHealth], Sequence[Action]]


def repair_policy(group: Group, config: TandemConfig) -> Policy:
    """Return the policy of the group that contains this kind of rank."""
    if group in (Group.ATTENTION, Group.EXPERT):
        return partial(repair, within_s=config.groups.recovery_timeout_s)
    in_lockstep = group is Group.PREFILL and config.prefill.experts == "all_to_all"
    return rebuild if in_lockstep else replace_each


def most_missed(
    reports: Mapping[str, int], num_reporters: int, since_s: Mapping[str, float], now_s: float
) -> tuple[list[str], dict[str, float]]:
    """Return expert ranks that are missed for long enough, and since when half or more miss each.

    Long enough: MAJORITY_TIMEOUT_S by a majority of the attention ranks, TIE_TIMEOUT_S by half of
    them.
    reports: number of attention ranks that miss each. since_s: the second result of the last call.
    """
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
    """Restart all ranks after any loss."""
    first = next(iter(health.problems.items()), None)
    return [] if first is None else [Replace(health.names, *first)]


def repair(health: GroupHealth, *, within_s: float) -> Sequence[Action]:
    """Replace each lost rank; give up if one is unavailable for `within_s`."""
    replacing = replace_each(health)
    if health.unavailable_s < within_s:
        return replacing
    problems = {**health.replaced, **health.problems}
    reports = [why if name in why else f"{name}: {why}" for name, why in problems.items()]
    return [*replacing, GiveUp("; ".join(reports))]
