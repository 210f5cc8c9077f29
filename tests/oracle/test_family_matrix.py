"""Every family in every mode: logits and tokens are those of the single-process path.

By default each family runs in one of the modes. All: `python -m pytest -m slow
tests/oracle/test_family_matrix.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from contracts.plan import Order, Plan
from contracts.ranks import Group
from models.spec.model import read_spec
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    ThreadGroup,
    greedy,
    group_config,
    prefill_config,
)
from tests.support.local_model import LocalModel
from tests.support.placements import replicated_of
from tests.support.tiny_models import ALL_FAMILIES, Checkpoints, prompts

PLANS = [
    Plan(order=Order.PPPIPE, r1=3),
    Plan(order=Order.ASAS, r1=4, r2=3),
    Plan(order=Order.AASS, r1=2, r2=3),
    Plan(r1=4, sequence_chunks=(0.3, 0.55, 0.8, 1.0), shared_lag=3),
]
STEPS = 12


class Requests:
    """Sequences with a common prefix, and what the single-process path makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spec = folder, read_spec(folder)
        local = LocalModel.load(folder, dtype="float32")
        head = prompts(1, [20])[0]
        self.sequences = [head + tail for tail in prompts(2, [1, 9, 45])] + prompts(3, [31, 2])
        self._logits = local.last_logits(self.sequences)
        self._tokens = [local.greedy(ids, STEPS) for ids in self.sequences]

    def check(self, client: RankConnection) -> None:
        ids = [client.submit(each, sampling=greedy(STEPS)) for each in self.sequences]
        found = client.last_logits(self.sequences)
        torch.testing.assert_close(found, self._logits, atol=2e-5, rtol=0)
        assert [client.generated(request)[0] for request in ids] == self._tokens


def plans(requests: Requests, store: Path) -> None:
    with ThreadGroup(requests.folder, group_config(1, 3)) as group, group.client() as client:
        for plan in PLANS:
            group.pin(plan)
            requests.check(client)


def placement(requests: Requests, store: Path) -> None:
    extra = replicated_of(requests.spec, [2, 0], 5)
    group = ThreadGroup(requests.folder, group_config(1, 2), placements={Group.EXPERT: extra})
    with group, group.client() as client:
        requests.check(client)


def offload(requests: Requests, store: Path) -> None:
    config = group_config(1, 2, experts={"slots": 3}, prefill={"host_store": str(store)})
    with ThreadGroup(requests.folder, config, backend="tcp") as group, group.client() as client:
        requests.check(client)


def preemption(requests: Requests, store: Path) -> None:
    """Chunked prompts, and fewer blocks than the sequences need at once."""
    config = group_config(1, 1, kv={"pool_tokens": 16 * 9}, schedule={"max_batch_tokens": 40})
    with ThreadGroup(requests.folder, config) as group, group.client() as client:
        requests.check(client)
        assert group.attention[0].status().sections["totals"]["requeued"] > 0


def repair(requests: Requests, store: Path) -> None:
    with ThreadGroup(requests.folder, group_config(1, 2)) as group, group.client() as client:
        started = client.submit(requests.sequences[2], sampling=greedy(STEPS))
        client.wait_started(started)
        group.replace("expert-1")
        requests.check(client)
        assert client.generated(started)[0] == requests._tokens[2]


def prefill(requests: Requests, store: Path) -> None:
    for mode in ({}, {"experts": "streamed", "max_batch_tokens": 64}):
        config = prefill_config(prefill={**mode, "host_store": str(store)})
        with PrefillThreads(requests.folder, config) as group, group.client() as client:
            requests.check(client)


def cached_prefill(requests: Requests, store: Path) -> None:
    sections = {"experts": "cached", "host_store": str(store)}
    config = prefill_config(prefill=sections, experts={"slots": 5})
    with PrefillThreads(requests.folder, config) as group, group.client() as client:
        requests.check(client)


MODES: list[Callable[[Requests, Path], None]] = [
    plans, placement, offload, preemption, repair, prefill, cached_prefill,
]  # fmt: skip


def _cases() -> list[ParameterSet]:
    found = []
    for number, family in enumerate(ALL_FAMILIES):
        for place, mode in enumerate(MODES):
            is_quick = place == number % len(MODES)
            marks = () if is_quick else (pytest.mark.slow,)
            found.append(pytest.param(family, mode, marks=marks, id=f"{family}-{mode.__name__}"))
    return found


@pytest.mark.parametrize(("family", "mode"), _cases())
def test_family_in_mode_equals_the_single_process_path(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    family: str,
    mode: Callable[[Requests, Path], None],
) -> None:
    mode(Requests(tiny_checkpoint(family)), tmp_path)
