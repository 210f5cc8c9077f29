"""Placement and formation of a group: the parts that need no Ray cluster."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from actors.ranks.rendezvous import GroupSpec, Seat, form_group, make_specs
from cluster.fleet.nodes import (
    Node,
    RankPlacement,
    check_resources,
    rank_requests,
    resolve_backend,
    resolve_device,
    seat_ranks,
)
from contracts.config import TandemConfig
from contracts.errors import (
    ChannelError,
    CheckpointError,
    HandshakeError,
    LaunchError,
    ResourceError,
    TandemError,
)
from contracts.loading import load_config
from contracts.ranks import Group, RankReady, RankSpec
from tests.support.one_line_errors import one_line_error
from tests.support.started_ranks import StartedRank


def test_auto_device_is_gpu_only_with_one_for_each_rank() -> None:
    config = load_config(None, ["groups.attention_ranks=2", "groups.expert_ranks=2"])
    assert resolve_device(config, {"CPU": 8}) == "cpu"
    assert resolve_device(config, {"CPU": 8, "GPU": 3}) == "cpu"
    assert resolve_device(config, {"CPU": 8, "GPU": 4}) == "cuda"


def test_backend_follows_placement_unless_configured() -> None:
    auto = TandemConfig()
    assert resolve_backend(auto, "cpu", ["a", "a"]) == ("shm", "one node without GPUs")
    assert resolve_backend(auto, "cpu", ["a", "b"]) == ("tcp", "2 nodes without GPUs")
    assert resolve_backend(auto, "cuda", ["a", "b", "b"]) == ("nccl", "2 nodes with GPUs")
    backend, reason = resolve_backend(auto, "cuda", ["a", "a"])
    assert backend == "ipc"
    assert "copy engines" in reason
    configured = load_config(None, ["channel.backend=tcp"])
    assert resolve_backend(configured, "cpu", ["a"]).backend == "tcp"


def test_each_rank_requests_its_share_and_group_resources() -> None:
    config = load_config(
        None,
        ["groups.attention_ranks=2", "groups.cpus_per_rank=0.5", "groups.expert_resources={eg: 1}"],
    )
    assert [tuple(request) for request in rank_requests(config, "cpu")] == [
        (Group.ATTENTION, 0, {"CPU": 0.5}),
        (Group.ATTENTION, 1, {"CPU": 0.5}),
        (Group.EXPERT, 0, {"CPU": 0.5, "eg": 1}),
    ]
    assert rank_requests(config, "cuda")[0].resources["GPU"] == 1


def placed(config: TandemConfig, groups: Sequence[Group], nodes: str, device: str) -> RankPlacement:
    requests = rank_requests(config, device, groups)
    return RankPlacement(requests, None, device, [Node(id, f"at-{id}", f"at-{id}") for id in nodes])


def seats_on(nodes: str, prefill_nodes: str, device: str, *settings: str) -> list[Seat]:
    """Return the seats of two ranks of each kind on these nodes."""
    ranks = [f"groups.{kind}_ranks=2" for kind in ("attention", "expert", "prefill")]
    config = load_config(None, [*ranks, *settings])
    both = [
        placed(config, (Group.ATTENTION, Group.EXPERT), nodes, device),
        placed(config, (Group.PREFILL,), prefill_nodes, device),
    ]
    return [seat for seats in seat_ranks(both, config) for seat in seats]


def test_ranks_of_both_pipelines_share_the_kv_memory_of_their_node() -> None:
    seats = seats_on("aabb", "ac", "cpu")
    first, second, _, _, third, fourth = [seat.ranks_on_node for seat in seats]
    assert (first, second, third, fourth) == (3, 3, 3, 1)
    shares = [seat.core_share for seat in seats]
    assert shares == [(0, 3), (1, 3), (0, 2), (1, 2), (2, 3), (0, 1)]
    assert [seat.host for seat in seats[4:]] == ["at-a", "at-c"]


@pytest.mark.parametrize(("backend", "shares"), [("nccl", 1), ("ipc", 4)])
def test_rank_with_own_gpu_has_all_its_memory(backend: str, shares: int) -> None:
    seats = seats_on("aaaa", "aa", "cuda", f"channel.backend={backend}")
    assert {(seat.device, seat.ranks_on_node) for seat in seats} == {("cuda:0", shares)}


@pytest.mark.parametrize(
    ("overrides", "device", "parts"),
    [
        (["groups.cpus_per_rank=4"], "cpu", ["2 ranks", "8 CPU", "has 2", "cpus_per_rank"]),
        ([], "cuda", ["2 ranks", "2 GPU", "has 0", "fewer ranks"]),
        (["groups.expert_resources={eg: 1}"], "cpu", ["1 eg", "has 0"]),
    ],
)
def test_resources_beyond_the_cluster_are_named(
    overrides: list[str], device: str, parts: list[str]
) -> None:
    requests = rank_requests(load_config(None, overrides), device)
    with one_line_error(ResourceError, *parts):
        check_resources(requests, {"CPU": 2.0})


# --- formation


def specs_of_four() -> list[RankSpec]:
    seats = [Seat("cpu", "127.0.0.1", 1)] * 2
    return make_specs(GroupSpec(TandemConfig(), "folder", b"t", 1, "shm"), seats, seats)


def addresses_of(specs: Sequence[RankSpec], *names: str) -> list[RankReady]:
    """Return what these ranks report when they have loaded."""
    ranks = [StartedRank(spec.name, spec=spec) for spec in specs if spec.name in names]
    return [rank.ready for rank in ranks]


@pytest.mark.parametrize(
    ("rank", "method", "answer", "error", "parts"),
    [
        ("expert-1", "prepare", None, LaunchError, ["load its weights in time"]),
        ("attention-0", "connect", None, LaunchError, ["ready_timeout_s"]),
        ("expert-0", "start", None, LaunchError, ["start its loop in time"]),
        (
            "attention-1",
            "connect",
            ChannelError("cannot join expert-0: no handshake"),
            TandemError,
            ["expert-0", "no handshake"],
        ),
    ],
)
def test_rank_that_prevents_formation_is_named(
    rank: str, method: str, answer: Any, error: type[TandemError], parts: list[str]
) -> None:
    specs = specs_of_four()
    ranks = [StartedRank(spec.name) for spec in specs]
    next(one for one in ranks if one.name == rank).answers[method] = answer or Future()
    with pytest.raises(error) as caught:
        form_group(specs, ranks, timeout_s=0.2)
    for part in parts:
        assert part in caught.value.message
    assert caught.value.message.count(rank) == 1


def test_failure_is_reported_while_an_earlier_rank_is_busy() -> None:
    specs = specs_of_four()
    ranks = [StartedRank(spec.name) for spec in specs]
    ranks[0].answers["prepare"] = Future()
    ranks[-1].answers["prepare"] = CheckpointError("a.safetensors: truncated")
    with pytest.raises(CheckpointError, match=r"expert-1: a\.safetensors: truncated"):
        form_group(specs, ranks, timeout_s=60.0)


def rank_without_link() -> tuple[list[RankSpec], StartedRank]:
    """Return a rank that cannot connect to expert-1."""
    specs = specs_of_four()
    rank = StartedRank(specs[0].name)
    rank.answers["connect"] = lambda addresses: (
        ChannelError("cannot join expert-1: refused") if "expert-1" in addresses else None
    )
    return specs, rank


def test_loaded_rank_is_kept_if_another_is_lost_meanwhile() -> None:
    specs, rank = rank_without_link()
    known = [addresses_of(specs, "expert-0", "expert-1"), addresses_of(specs, "expert-0")]
    replies = iter(known)
    (ready,) = form_group(specs[:1], [rank], timeout_s=60.0, others=lambda: next(replies))
    assert ready.name == "attention-0"
    assert rank.calls_of("connect") == [
        [{each.name: each.channel_address for each in some}] for some in known
    ]


@pytest.mark.parametrize("allow_unreachable", [False, True])
def test_unreachable_rank_is_omitted_if_allowed_or_named(
    allow_unreachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ranks.rendezvous.REACH_TIMEOUT_S", 0.2)
    monkeypatch.setattr("actors.ranks.rendezvous.DEGRADED_REACH_TIMEOUT_S", 0.2)
    specs, rank = rank_without_link()
    present = addresses_of(specs, "expert-0", "expert-1")
    form = partial(form_group, specs[:1], [rank], timeout_s=60.0, others=lambda: present)
    if allow_unreachable:
        (ready,) = form(allow_unreachable=True)
        assert ready.name == "attention-0"
        return
    with pytest.raises(LaunchError, match=r"attention-0 could not connect .* expert-1: refused"):
        form()
    assert len(rank.calls_of("connect")) > 1


@pytest.mark.parametrize(
    "error",
    [
        LaunchError("attention-0: its process ended"),
        HandshakeError("expert-0 refused attention-0: wrong token"),
    ],
)
def test_lost_or_refused_rank_is_reported_at_once(error: TandemError) -> None:
    specs = specs_of_four()
    rank = StartedRank(specs[0].name)
    rank.answers["connect"] = error
    present = addresses_of(specs, "expert-0")
    with pytest.raises(LaunchError, match=error.message):
        form_group(
            specs[:1], [rank], timeout_s=60.0, others=lambda: present, allow_unreachable=True
        )
    assert len(rank.calls_of("connect")) == 1
