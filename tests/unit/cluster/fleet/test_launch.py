"""Placement and formation of a group: the parts that need no Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from actors.ranks.rendezvous import GroupSpec, Seat, form_group, make_specs
from cluster.fleet.nodes import (
    Node,
    RankPlacement,
    check_resources,
    kv_ranks,
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

PIPELINES = ("attention", "expert", "prefill")


def test_auto_takes_gpus_only_where_there_is_one_for_each_rank() -> None:
    config = load_config(None, ["groups.attention_ranks=2", "groups.expert_ranks=2"])
    assert resolve_device(config, {"CPU": 8}) == "cpu"
    assert resolve_device(config, {"CPU": 8, "GPU": 3}) == "cpu"
    assert resolve_device(config, {"CPU": 8, "GPU": 4}) == "cuda"


def test_the_backend_follows_placement_unless_it_is_set() -> None:
    auto = TandemConfig()
    assert resolve_backend(auto, "cpu", ["a", "a"]) == "shm"
    assert resolve_backend(auto, "cpu", ["a", "b"]) == "tcp"
    assert resolve_backend(auto, "cuda", ["a", "b"]) == "nccl"
    assert resolve_backend(load_config(None, ["channel.backend=tcp"]), "cpu", ["a"]) == "tcp"


def test_each_rank_requests_its_share_and_group_resources() -> None:
    config = load_config(
        None,
        ["groups.attention_ranks=2", "groups.cpus_per_rank=0.5", "groups.expert_resources={eg: 1}"],
    )
    requests = rank_requests(config, "cpu")
    assert [(r.group, r.rank) for r in requests] == [
        (Group.ATTENTION, 0),
        (Group.ATTENTION, 1),
        (Group.EXPERT, 0),
    ]
    assert [r.resources for r in requests] == [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5, "eg": 1}]
    assert rank_requests(config, "cuda")[0].resources["GPU"] == 1


def placed(config: TandemConfig, groups: Sequence[Group], nodes: str, device: str) -> RankPlacement:
    requests = rank_requests(config, device, groups)
    return RankPlacement(requests, None, device, [Node(id, f"at-{id}", f"at-{id}") for id in nodes])


def test_a_nodes_memory_for_kv_is_shared_by_all_its_ranks_of_both_pipelines() -> None:
    config = load_config(None, [f"groups.{kind}_ranks=2" for kind in PIPELINES])
    generating = placed(config, (Group.ATTENTION, Group.EXPERT), "aabb", "cpu")
    prefilling = placed(config, (Group.PREFILL,), "ac", "cpu")
    with_kv = kv_ranks([generating, prefilling])
    attention = [seat.ranks_on_node for seat in seat_ranks(generating, with_kv)[:2]]
    assert attention == [3, 3]
    assert [seat.ranks_on_node for seat in seat_ranks(prefilling, with_kv)] == [3, 1]
    assert [seat.host for seat in seat_ranks(prefilling, with_kv)] == ["at-a", "at-c"]


def test_rank_with_own_gpu_has_all_its_memory() -> None:
    for backend, shares in (("nccl", 1), ("ipc", 4)):
        ranks = [f"groups.{kind}_ranks=2" for kind in PIPELINES]
        config = load_config(None, [*ranks, f"channel.backend={backend}"])
        both = [
            placed(config, (Group.ATTENTION, Group.EXPERT), "aaaa", "cuda"),
            placed(config, (Group.PREFILL,), "aa", "cuda"),
        ]
        seats = [seat for one in both for seat in seat_ranks(one, kv_ranks(both))]
        assert {(seat.device, seat.ranks_on_node) for seat in seats} == {("cuda:0", shares)}


@pytest.mark.parametrize(
    ("overrides", "device", "parts"),
    [
        (["groups.cpus_per_rank=4"], "cpu", ["2 ranks", "8 CPU", "has 2", "cpus_per_rank"]),
        ([], "cuda", ["2 ranks", "2 GPU", "has 0", "fewer ranks"]),
        (["groups.expert_resources={eg: 1}"], "cpu", ["1 eg", "has 0"]),
    ],
)
def test_resources_that_the_cluster_could_never_give_are_named(
    overrides: list[str], device: str, parts: list[str]
) -> None:
    requests = rank_requests(load_config(None, overrides), device)
    with pytest.raises(ResourceError) as caught:
        check_resources(requests, {"CPU": 2.0})
    for part in parts:
        assert part in caught.value.message


def test_exactly_enough_is_enough() -> None:
    config = load_config(None, ["groups.cpus_per_rank=0.1", "groups.expert_ranks=9"])
    check_resources(rank_requests(config, "cpu"), {"CPU": 1.0})


# --- formation


class FakeRank:
    """A worker handle whose calls answer at once, fail, or never answer."""

    def __init__(self, spec: RankSpec, log: list[str], answers: dict[str, Any]) -> None:
        self.spec = spec
        self._log = log
        self._answers = answers

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._log.append(f"{self.spec.name} {method} {arguments[0]}" if method == "connect" else "")
        ready = RankReady(name=self.spec.name, pid=1, channel_address=f"addr-{self.spec.name}")
        answer = self._answers.get(method, ready if method == "prepare" else None)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer != "never":
            future.set_result(answer)
        return future


def group_of(
    answers: dict[str, dict[str, Any]],
) -> tuple[list[RankSpec], list[FakeRank], list[str]]:
    seats = [Seat("cpu", "127.0.0.1", 1)] * 2
    specs = make_specs(GroupSpec(TandemConfig(), "folder", b"t", 1, "shm"), seats, seats)
    log: list[str] = []
    return specs, [FakeRank(spec, log, answers.get(spec.name, {})) for spec in specs], log


def test_attention_ranks_connect_to_every_expert_rank() -> None:
    specs, ranks, log = group_of({})
    ready = form_group(specs, ranks, timeout_s=5.0)
    assert [answer.name for answer in ready] == [spec.name for spec in specs]
    addresses = {"expert-0": "addr-expert-0", "expert-1": "addr-expert-1"}
    connects = [line for line in log if line]
    assert connects == [f"attention-{rank} connect {addresses}" for rank in range(2)]


@pytest.mark.parametrize(
    ("rank", "method", "answer", "error", "parts"),
    [
        ("expert-1", "prepare", "never", LaunchError, ["expert-1", "load its weights in time"]),
        ("attention-0", "connect", "never", LaunchError, ["attention-0", "ready_timeout_s"]),
        ("expert-0", "start", "never", LaunchError, ["expert-0", "start its loop in time"]),
        (
            "expert-1",
            "prepare",
            CheckpointError("a.safetensors: truncated"),
            CheckpointError,
            ["expert-1", "a.safetensors: truncated"],
        ),
        (
            "attention-1",
            "connect",
            ChannelError("cannot join expert-0: no handshake"),
            TandemError,
            ["attention-1", "expert-0", "no handshake"],
        ),
        (
            "expert-0",
            "prepare",
            LaunchError("expert-0: its process ended"),
            LaunchError,
            ["expert-0: its process ended"],
        ),
    ],
)
def test_a_rank_that_keeps_a_group_from_forming_is_named(
    rank: str, method: str, answer: Any, error: type[TandemError], parts: list[str]
) -> None:
    specs, ranks, _ = group_of({rank: {method: answer}})
    with pytest.raises(error) as caught:
        form_group(specs, ranks, timeout_s=0.2)
    for part in parts:
        assert part in caught.value.message
    assert caught.value.message.count(rank) == 1


def test_failure_is_reported_while_an_earlier_rank_is_busy() -> None:
    broken = {"prepare": CheckpointError("a.safetensors: truncated")}
    specs, ranks, _ = group_of({"attention-0": {"prepare": "never"}, "expert-1": broken})
    with pytest.raises(CheckpointError, match=r"expert-1: a\.safetensors: truncated"):
        form_group(specs, ranks, timeout_s=60.0)


def loaded(specs: Sequence[RankSpec], *names: str) -> list[RankReady]:
    wanted = [spec.name for spec in specs if spec.name in names]
    return [RankReady(name=name, pid=1, channel_address=f"addr-{name}") for name in wanted]


class Unreached(FakeRank):
    """Cannot join expert-1, as long as it is told to."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self._answers = {}
        if method == "connect" and "expert-1" in arguments[0]:
            self._answers = {"connect": ChannelError("cannot join expert-1: nobody is there")}
        return super().call(method, *arguments)


def test_what_has_been_loaded_is_kept_though_another_rank_is_lost_meanwhile() -> None:
    specs, _, log = group_of({})
    known = [loaded(specs, "expert-0", "expert-1"), loaded(specs, "expert-0")]
    replies = iter(known)
    rank = Unreached(specs[0], log, {})
    (ready,) = form_group(specs[:1], [rank], timeout_s=60.0, others=lambda: next(replies))
    assert ready.name == "attention-0"
    assert [line for line in log if line] == [
        f"attention-0 connect { ({each.name: each.channel_address for each in some}) }"
        for some in known
    ]


@pytest.mark.parametrize("allow_unreachable", [False, True])
def test_one_that_stays_out_of_reach_is_gone_without_or_named(
    allow_unreachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ranks.rendezvous.REACH_TIMEOUT_S", 0.2)
    monkeypatch.setattr("actors.ranks.rendezvous.DEGRADED_REACH_TIMEOUT_S", 0.2)
    specs, _, log = group_of({})
    rank, there = Unreached(specs[0], log, {}), loaded(specs, "expert-0", "expert-1")
    if allow_unreachable:
        (ready,) = form_group(
            specs[:1], [rank], timeout_s=60.0, others=lambda: there, allow_unreachable=True
        )
        assert ready.name == "attention-0"
        return
    with pytest.raises(LaunchError, match=r"attention-0 could not connect .* expert-1: nobody"):
        form_group(specs[:1], [rank], timeout_s=60.0, others=lambda: there)
    assert len([line for line in log if line]) > 1


@pytest.mark.parametrize(
    "error",
    [
        LaunchError("attention-0: its process ended"),
        HandshakeError("expert-0 refused attention-0: wrong token"),
    ],
)
def test_lost_or_refused_rank_is_reported_at_once(error: TandemError) -> None:
    specs, _, log = group_of({})
    rank = FakeRank(specs[0], log, {"connect": error})
    there = loaded(specs, "expert-0")
    with pytest.raises(LaunchError, match=error.message):
        form_group(specs[:1], [rank], timeout_s=60.0, others=lambda: there, allow_unreachable=True)
    assert len([line for line in log if line]) == 1
