"""Specs of ranks for tests of one of a rank's parts."""

from pathlib import Path
from typing import Any

from contracts.ranks import Group, RankSpec


def rank_spec(group: Group, model_folder: Path | str = "", **fields: Any) -> RankSpec:
    """Return the spec of a rank, by default the first of a group with one of each kind."""
    decode = int(group is not Group.PREFILL)
    given = {
        "rank": 0,
        "attention_ranks": decode,
        "expert_ranks": decode,
        "token": b"",
        "epoch": 1,
        "device": "cpu",
        "backend": "shm",
        **fields,
    }
    return RankSpec(group=group, model_folder=str(model_folder), **given)
