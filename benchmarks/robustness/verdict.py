"""What came of a run, as numbers, and what must not have. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.robustness.clients import WRONG, Outcome, Stream
from benchmarks.robustness.run import Done, Run

ROUNDED = "rounded"  # as long, and other words: that is how bfloat16 is
SHOWN = 5


def failures(run: Run, left: Sequence[str]) -> list[str]:
    """Why the run has failed. left: what is there after its end, in words."""
    wrong = [one for one in run.clients.outcomes if one.how in WRONG]
    found = [f"{one.kind} {one.how}: {one.detail}" for one in wrong[:SHOWN]]
    if len(wrong) > SHOWN:
        found.append(f"and {len(wrong) - SHOWN} more answers")
    found += run.wrong
    never = [one.fault.label for one in run.done if one.whole_s is None]
    found += [f"not whole again after: {label}" for label in never]
    found += [
        f"{count:g} KV blocks in use at {rank}" for rank, count in run.used_blocks.items() if count
    ]
    return found + [f"left: {what}" for what in left]


def counted(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """By kind of question: how many answers were the same, and what else there was."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in outcomes:
        found[one.kind][one.how] += 1
    return {kind: dict(counts) for kind, counts in sorted(found.items())}


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """By kind of question: the share of answers that are rounded otherwise than before."""
    return {
        kind: counts.get(ROUNDED, 0) / sum(counts.values())
        for kind, counts in counted(outcomes).items()
    }


def waits(done: Sequence[Done], streams: Sequence[Stream]) -> dict[str, dict[str, list[float]]]:
    """By fault, seconds: found (until the loss was), next_token (of each stream that was open,
    until its next piece), last_token (of the one that waited longest), whole (until all served
    again)."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in done:
        each = found.setdefault(one.fault.label, defaultdict(list))
        nexts = [s for stream in streams if (s := stream.after(one.at_s)) is not None]
        each["next_token"] += nexts
        if nexts:
            each["last_token"].append(max(nexts))
        if one.found_s is not None:
            each["found"].append(one.found_s)
        if one.whole_s is not None:
            each["whole"].append(one.whole_s)
    return {label: dict(each) for label, each in sorted(found.items())}


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def table(run: Run) -> str:
    """Markdown."""
    lines = [
        "| fault | times | loss found p50 | p99 | first token after it, last stream: p50 | p99"
        " | whole again p50 |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    counts = Counter(one.fault.label for one in run.done)
    for label, each in waits(run.done, run.clients.streams).items():
        last = each.get("last_token", [])
        found = each.get("found", [])
        cells = [_seconds(some, part) for some in (found, last) for part in (0.5, 0.99)]
        cells.append(_seconds(each.get("whole", []), 0.5))
        lines.append(f"| {label} | {counts[label]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(values: Sequence[float], part: float) -> str:
    return f"{quantile(values, part):.2f} s" if values else ""


def summary(run: Run, left: Sequence[str]) -> dict[str, Any]:
    outcomes = run.clients.outcomes
    return {
        "faults": len(run.done),
        "answers": counted(outcomes),
        "wrong": sum(one.how in WRONG for one in outcomes),
        "rounded_otherwise": shares(outcomes),
        "rounded_otherwise_undisturbed": shares(run.undisturbed),
        "cut_with_their_ingress_and_asked_again": run.clients.cut_with_ingress,
        "undisturbed_answers_that_differed": run.differed,
        "left": list(left),
        "failures": failures(run, left),
    }
