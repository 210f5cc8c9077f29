"""Dispatch on a device against numpy's: with CPU tensors, or on a GPU where there is one."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.moe.backend import TaskKey
from actors.moe.dispatch import (
    PACKET_PARTS,
    DeviceSlice,
    DispatchCounts,
    PacketPlanner,
    RankSlice,
    plan_dispatch,
)
from actors.moe.routing_sample import RoutingSample
from contracts.placement import bounds_of
from contracts.requests import Priority
from kernels import gpu_experts
from kernels.experts import ClampedGate, expert_steps
from kernels.linear import ExpertLinears
from kernels.steps import run_to_end
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import LayerSlots, RoundRobinChooser
from planner.schedule.batch_plan import token_group_bounds
from tests.support.manual_clock import ManualClock
from tests.support.placements import replicated

CPU = torch.device("cpu")
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


class Case:
    """A micro-batch of random tokens and a random placement."""

    def __init__(self, tokens: int, ranks: int, extra: int, groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        experts, top_k = int(rng.integers(ranks, 14)), 3
        experts = max(experts, top_k)
        more = [extra * int(rng.integers(0, 3)) for _ in range(ranks)]
        made = replicated(experts, more, num_layers=1, moe_layers=[0], seed=seed)
        self.placed = LayerSlots(made.expert_of_slot[0], bounds_of(made.slots_per_rank))
        if self.placed.choice is not None:  # the rule of a device
            slot_ER = np.full((experts, ranks), -1)
            for rank, (low, high) in enumerate(self.placed.bounds):
                slot_ER[self.placed.expert_of_slot[low:high], rank] = range(low, high)
            self.placed.choice = RoundRobinChooser(slot_ER)
        chosen = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
        self.ids_TK = torch.from_numpy(np.stack(chosen))
        self.weights_TK = torch.from_numpy(rng.random((tokens, top_k), np.float32))
        self.x_TD = torch.from_numpy(rng.standard_normal((tokens, 6), np.float32))
        self.groups = token_group_bounds(tokens, groups)
        self.key = TaskKey(1, 0, 0, Priority.LS)

    @property
    def on_host(self) -> list[RankSlice]:
        return plan_dispatch(self.ids_TK.numpy(), self.weights_TK.numpy(), self.groups, self.placed)

    def on_device(
        self, planner: PacketPlanner | None = None, device: torch.device = CPU
    ) -> list[DeviceSlice]:
        """Plan twice, the second time without waiting for a GPU if no `planner` is given."""
        tensors = (each.to(device) for each in (self.x_TD, self.ids_TK, self.weights_TK))
        plan = self.key, RoutedTokens(*tensors), self.groups, self.placed
        if planner is not None:
            return planner.plan_on_device(*plan)
        counts = DispatchCounts(len(self.placed.bounds))
        planner = PacketPlanner(counts, None, lambda: 0.0)
        planner.plan_on_device(*plan)  # copies the placement
        if device is CPU:
            return planner.plan_on_device(*plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return planner.plan_on_device(*plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


cases = st.builds(
    Case,
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 1),
    st.integers(1, 3),
    st.integers(0, 10_000),
)


def same(found: RankSlice, expected: RankSlice) -> None:
    assert found[:4] == expected[:4]
    every_row = np.arange(found.start, found.stop)
    rows_of = [every_row if each.rows_U is None else each.rows_U for each in (found, expected)]
    assert rows_of[0].tolist() == rows_of[1].tolist()
    for one, other in zip(found[5:], expected[5:], strict=True):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())


@given(cases)
def test_packets_of_a_device_equal_those_of_the_host(case: Case) -> None:
    """Packets in memory of their own, as a channel's; those without a pair are additional."""
    found, x_TD = {}, case.x_TD.bfloat16()
    for piece in case.on_device(device=HERE):
        specs = piece.parts(x_TD)
        out = [torch.empty(spec.shape, dtype=spec.torch_dtype, device=HERE) for spec in specs]
        piece.fill(x_TD.to(HERE), out)
        received = piece._replace(pairs_CM=out[1], counts_e=out[2]).on_host()
        rows = slice(None) if received.rows_U is None else received.rows_U
        sent_TD = x_TD[piece.start : piece.stop] if received.rows_U is None else x_TD
        assert torch.equal(out[0][: received.num_rows].cpu(), sent_TD[rows])
        if len(received.index_N):
            found[piece.token_group, piece.rank] = received
        else:
            assert not received.counts_e.any()
    expected = case.on_host
    assert found.keys() == {(piece.token_group, piece.rank) for piece in expected}
    for sent in expected:
        same(found[sent.token_group, sent.rank], sent)


class Scaled:
    """A product of a row by numbers, so that bits depend neither on rows beside it nor on sums."""

    def __init__(self, factor_N: torch.Tensor) -> None:
        self._factor_N, self.shape = factor_N, factor_N.shape

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        rows = -(-len(self._factor_N) // x_TK.shape[1])
        return x_TK.repeat(1, rows)[:, : len(self._factor_N)] * self._factor_N


@given(cases, st.sampled_from([None, ClampedGate(1.7, 0.5)]))
def test_sums_of_a_device_equal_those_of_the_host(case: Case, clamped: ClampedGate | None) -> None:
    """Packets to experts, weighted sums of each rank, and their sum, with equal bits.

    In float16, for which the host has no compiled products with rounding of their own.
    """
    x_TD = case.x_TD.half()
    generator = torch.Generator().manual_seed(1)
    factor_SN = torch.randn((case.placed.count, 16), generator=generator).half()
    gate_up_S = [Scaled(factor_N[:10]) for factor_N in factor_SN]
    down_S = [Scaled(factor_N[10:]) for factor_N in factor_SN]
    sums = []
    pieces: Any
    for pieces in (case.on_host, case.on_device()):
        total_TD = torch.zeros_like(case.x_TD)
        for piece in pieces:
            out = [torch.empty(spec.shape, dtype=spec.torch_dtype) for spec in piece.parts(x_TD)]
            piece.fill(x_TD, out)
            held = slice(*case.placed.bounds[piece.rank])
            gate_up, down = (ExpertLinears(each[held], None) for each in (gate_up_S, down_S))
            if len(out) == PACKET_PARTS:
                local_CK, bits_CK = out[1].chunk(2, dim=1)
                weights_CK = bits_CK.view(torch.float32)
                y_UD = gpu_experts.gpu_experts(
                    out[0], local_CK, weights_CK, gate_up, down, clamped, out[2]
                )
            else:
                counts: list[int] = out[3].tolist()
                y_UD = run_to_end(
                    expert_steps(out[0], gate_up, down, out[1], out[2], counts, clamped)
                )
            run_to_end(piece.add_to(total_TD, y_UD))
        sums.append(total_TD)
    assert torch.equal(sums[1], sums[0])


@given(cases, st.integers(0, 1))
def test_packets_are_cut_again_as_on_the_host(case: Case, empty_ranks: int) -> None:
    experts = len(case.placed.slots_of_expert)
    placed = LayerSlots(range(experts), bounds_of([0] * empty_ranks + [experts]))
    expected = {(p.token_group, p.rank): p.recut(case.placed, placed, 9) for p in case.on_host}
    for piece in case.on_device():
        again = piece.recut(case.placed, placed, 9)
        host = expected.get((piece.token_group, piece.rank), [])
        for one, other in zip(again, host, strict=True):
            same(one.on_host(), other)


def test_counts_and_samples_follow_without_a_wait() -> None:
    clock, made = ManualClock(10.0), list[Any]()
    case = Case(20, 3, 0, 2, 5)
    counts, expected = DispatchCounts(3), DispatchCounts(3)
    sample = RoutingSample("attention-0", 256, (1, 3), clock, made.append)
    planner = PacketPlanner(counts, sample, clock)
    for _ in range(3):
        expected.add(0, 20, case.on_host, case.placed)
        case.on_device(planner)
    planner.poll()
    assert (counts.tokens, counts.pairs_R) == (60, [0, 0, 0])
    clock.advance(1.0)
    expected.add(0, 20, case.on_host, case.placed)
    case.on_device(planner)
    planner.poll()
    for name in ("tokens", "copies", "pairs_R"):
        assert getattr(counts, name) == getattr(expected, name), name
    assert counts._most_used() == expected._most_used()


@given(cases)
def test_own_rank_serves_all_experts_that_it_has(case: Case) -> None:
    clock, counts = ManualClock(10.0), DispatchCounts(len(case.placed.bounds), own_rank=0)
    planner = PacketPlanner(counts, None, clock)
    clock.advance(1.0)
    others = case.on_device(planner)
    planner.poll()
    low, high = case.placed.bounds[0]
    own = set(case.placed.expert_of_slot[low:high])
    assert counts.pairs_R[0] == sum(int(expert) in own for expert in case.ids_TK.flatten())
    sent = [p.on_host() for p in others if p.rank and p.counts_e.any()]
    assert counts.copies == sum(piece.num_rows for piece in sent)
