"""Experts placed in any order, another in each layer, some with replicas: the answers are those of
the single-process path, in both pipelines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.placement import Placement
from contracts.plan import Order, Plan
from contracts.ranks import Group
from models.spec.model import read_spec
from planner.placement.slots import contiguous
from tests.support.fake_device import act_as_a_device
from tests.support.group_harness import (
    PrefillThreads,
    RankConnection,
    ThreadGroup,
    greedy,
    group_config,
    prefill_config,
)
from tests.support.local_group import LocalGroup
from tests.support.local_model import LocalModel
from tests.support.placements import replicated_of
from tests.support.tiny_models import Checkpoints, crossed, prompts

CALL_S = 30.0
PLANS = [Plan(), Plan(r1=2, r2=3), Plan(order=Order.AASS, r1=3, r2=2)]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 11, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 5}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {"num_local_experts": 5}),
    ("llama4_text", {}),
]
LENGTHS = [23, 1, 40, 7, 64]


@pytest.mark.usefixtures("ranks_are_forked")
def test_replicated_experts_in_processes_give_the_logits_of_the_single_process_path(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("deepseek_v3")
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    placements = {Group.EXPERT: replicated_of(spec, [2, 0, 3], 7)}
    with LocalGroup(str(folder), group_config(1, 3), placements=placements) as group:
        ((name, address),) = group.client_addresses.items()
        with RankConnection(name, address, group.token) as client:
            for number, plan in enumerate(PLANS):
                group.processes[name].call("pin_plan", plan).result(CALL_S)
                _check(client, local, prompts(number, LENGTHS))


VARIANTS: list[tuple[str, list[int], dict[str, Any], bool]] = [
    ("shm", [1, 2], {}, False),
    ("tcp", [0, 2, 3, 0], {}, False),
    ("tcp", [1, 3], {"slots": 12}, False),
    ("shm", [0, 0, 0], {}, True),
    ("tcp", [1, 0, 2], {}, True),
    ("tcp", [1, 3], {"slots": 12}, True),
]


@pytest.mark.parametrize(
    ("family", "overrides", "backend", "extra", "experts", "as_on_a_device"),
    crossed(FAMILIES, VARIANTS, every=3),
)
def test_replicated_experts_give_the_logits_of_the_single_process_path(
    tiny_checkpoint: Checkpoints,
    family: str,
    overrides: dict[str, Any],
    backend: str,
    extra: list[int],
    experts: dict[str, Any],
    as_on_a_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """as_on_a_device: the path of GPUs with CPU tensors; the host's path may not run."""
    if as_on_a_device:
        act_as_a_device(monkeypatch)
    folder = tiny_checkpoint(family, **overrides)
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    placements = {Group.EXPERT: replicated_of(spec, extra, 11)}
    config = group_config(1, len(extra), experts=experts)
    group = ThreadGroup(folder, config, backend=backend, placements=placements)
    with group, group.client() as client:
        for number, plan in enumerate(PLANS):
            group.pin(plan)
            _check(client, local, prompts(number, LENGTHS))


@pytest.mark.parametrize(
    ("family", "overrides", "as_on_a_device"), crossed(FAMILIES, [(False,), (True,)])
)
def test_workers_of_all_to_all_give_the_logits_of_the_single_process_path(
    tiny_checkpoint: Checkpoints,
    family: str,
    overrides: dict[str, Any],
    as_on_a_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if as_on_a_device:
        act_as_a_device(monkeypatch)
    folder = tiny_checkpoint(family, **overrides)
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    placements = {Group.PREFILL: replicated_of(spec, [2, 0, 1], 5)}
    config = prefill_config(prefill={"experts": "all_to_all"})
    with PrefillThreads(folder, config, workers=3, placements=placements) as workers:
        for rank in range(3):
            with workers.client(rank) as client:
                _check(client, local, prompts(rank, LENGTHS))


def test_where_an_expert_is_does_not_change_a_bit_of_top_2(tiny_checkpoint: Checkpoints) -> None:
    """Sums of two terms commute."""
    folder = tiny_checkpoint("mixtral", num_experts_per_tok=2)
    spec, found = read_spec(folder), []
    assert spec.top_k == 2
    in_order = contiguous(
        spec.num_experts, 2, num_layers=spec.num_layers, moe_layers=spec.moe_layers
    )
    for placement in (in_order, replicated_of(spec, [0, 0], 3), replicated_of(spec, [2, 1], 4)):
        group = ThreadGroup(folder, group_config(1, 2), placements={Group.EXPERT: placement})
        with group, group.client() as client:
            found.append([client.last_logits([ids]) for ids in prompts(2, LENGTHS)])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_a_placement_is_what_a_checkpoint_with_its_experts_in_that_order_is(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The paper permutes experts, and the router's rows with them, when it loads."""
    folder = tiny_checkpoint("mixtral")
    spec, local = read_spec(folder), LocalModel.load(folder, dtype="float32")
    order = np.random.default_rng(1).permutation(spec.num_experts).tolist()
    permuted = LocalModel.load(_permuted(folder, tmp_path, order), dtype="float32")
    layers = [tuple(order) if n in spec.moe_layers else () for n in range(spec.num_layers)]
    half = spec.num_experts // 2
    placement = Placement(
        num_experts=spec.num_experts,
        slots_per_rank=(half, spec.num_experts - half),
        expert_of_slot=tuple(layers),
    )
    sequences = prompts(8, LENGTHS)
    expected = local.last_logits(sequences)
    torch.testing.assert_close(permuted.last_logits(sequences), expected, atol=1e-5, rtol=0)
    group = ThreadGroup(folder, group_config(1, 2), placements={Group.EXPERT: placement})
    with group, group.client() as client:
        _check(client, permuted, sequences)


def _permuted(folder: Path, to: Path, order: Sequence[int]) -> Path:
    """Expert n of the copy is the old expert order[n]."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        copied = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(".gate.weight"):
                copied[name] = tensor[list(order)].contiguous()
            before, experts, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            if experts and number.isdigit():
                old = f"{before}.experts.{order[int(number)]}.{rest}"
                copied[name] = tensors[old].clone()
        save_file(copied, to / path.name, metadata={"format": "pt"})
    return to


def _check(client: RankConnection, local: LocalModel, sequences: list[list[int]]) -> None:
    expected = local.last_logits(sequences)
    torch.testing.assert_close(client.last_logits(sequences), expected, atol=1e-5, rtol=0)
    ids = [client.submit(seq, sampling=greedy(6)) for seq in sequences]
    tokens = [client.generated(request)[0] for request in ids]
    assert tokens == [local.greedy(seq, 6) for seq in sequences]
