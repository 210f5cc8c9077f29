"""Which faults come, of whom, and when: drawn from a seed. Pure."""

import random
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

SILENCE_S = 1.5  # `channel.heartbeat_timeout_s`
BOTH = 0.15  # of the faults come with a second one, of another process


class Kind(StrEnum):
    """KILL: SIGKILL. STOP: SIGSTOP, and SIGCONT after a while. WAKE: stopped and out of reach of
    who replaces it, it wakes up once another is in its place. For a while: FULL, nothing is left of
    /dev/shm; CUT, the link between two nodes takes nothing, or CUT_ONE_WAY; SLOW, it has a tenth of
    its rate."""

    KILL = "kill"
    STOP = "stop"
    WAKE = "wake"
    FULL = "full_shm"
    CUT = "cut_link"
    CUT_ONE_WAY = "cut_link_one_way"
    SLOW = "slow_link"


class Fault(NamedTuple):
    """target: a role, such as "expert-1", or "". stopped_s: duration. pause_s: delay before it.
    with_next: the next fault is simultaneous."""

    kind: Kind
    target: str
    stopped_s: float
    pause_s: float
    with_next: bool = False

    @property
    def kind_and_role(self) -> str:
        return f"{self.kind.value} {self.target.rstrip('0123456789-')}".strip()

    @property
    def label(self) -> str:
        """What is counted together: "kill expert", "stop attention over 1.5 s"."""
        if self.kind in (Kind.KILL, Kind.WAKE, Kind.FULL, Kind.SLOW):
            return self.kind_and_role
        return f"{self.kind_and_role} {'under' if self.stopped_s < SILENCE_S else 'over'} 1.5 s"


class Mix(NamedTuple):
    """weights: of faults, by kind and role ("kill expert"). stops_s: the shortest and the longest;
    half of them are under two seconds. longest_pause_s: from when everything serves again to the
    next fault."""

    weights: Mapping[str, float]
    stops_s: tuple[float, float] = (0.5, 20.0)
    longest_pause_s: float = 1.5


def read(schedule: str) -> list[Fault]:
    """As "kill expert-0,stop attention-1 2.5,cut_link 3+kill expert-1": with a plus, both at the
    same moment. Raises ValueError for another kind."""
    found = []
    for moment in schedule.split(","):
        for text in (together := moment.split("+")):
            kind, *rest = text.split()
            seconds = float(rest.pop()) if rest and rest[-1][0].isdigit() else 0.0
            with_next = text is not together[-1]
            found.append(Fault(Kind(kind), rest[0] if rest else "", seconds, 0.5, with_next))
    return found


def drawn(seed: int, count: int, roles: Sequence[str], mix: Mix) -> list[Fault]:
    """So many faults of these processes."""
    dice = random.Random(seed)
    names, weights = list(mix.weights), list(mix.weights.values())
    found: list[Fault] = []
    while len(found) < count:
        kind, _, role = dice.choices(names, weights)[0].partition(" ")
        targets = [name for name in roles if name.rstrip("0123456789-") == role]
        if found and found[-1].with_next:
            targets = [name for name in targets if name != found[-1].target]
            is_twice = not role and kind == found[-1].kind
            if is_twice or kind == Kind.WAKE or (role and not targets):
                found[-1] = found[-1]._replace(with_next=False)
                continue
        low, high = mix.stops_s
        middle = min(high, max(low, 2.0))
        stopped_s = dice.uniform(low, middle) if dice.random() < 0.5 else dice.uniform(middle, high)
        found.append(
            Fault(
                Kind(kind),
                dice.choice(targets) if targets else "",
                0.0 if kind in (Kind.KILL, Kind.WAKE) else round(stopped_s, 2),
                round(dice.uniform(0.1, mix.longest_pause_s), 2),
                dice.random() < BOTH
                and kind != Kind.WAKE  # it takes longer than a moment
                and not (found and found[-1].with_next),
            )
        )
    last = found[-1]._replace(with_next=False)
    return [*found[:-1], last]
