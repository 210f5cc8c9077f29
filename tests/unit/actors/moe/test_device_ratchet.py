"""Host reads, copies and launches of a layer and of a step, counted on the meta device.

Bounds may only fall. Before the device planned its packets, a layer with eight expert ranks had 2
host reads, 42 copies and 28 launches on its attention rank, and 4 reads and 42 launches for three
packets on an expert rank.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actors.batching.sampler import TokenSampler
from actors.batching.sequence import Sequence
from actors.channels.base import Header, Packet, PacketKind, TensorSpec
from actors.channels.link import Reservation, lay_out
from actors.gather.all_to_all import AllToAll
from actors.moe.backend import TaskKey, Topology, TopologySource
from actors.moe.expert_server import merge
from actors.moe.rank_experts import ResidentExperts
from actors.moe.remote_backend import RemoteBackend
from actors.telemetry.telemetry import Timeline
from contracts.messages import Submit
from contracts.plan import Plan
from contracts.requests import Priority, Sampling
from kernels import fused_ops, paged_attention
from kernels.linear import ExpertLinears, PackedLinear, Product, linears
from kernels.steps import run_to_end
from kernels.stored import Storage
from kernels.stored_experts import StoredLinear
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decode_graphs import DecodeGraphs
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf, RoutedTokens
from models.experts.expert_loading import ExpertLayer
from models.spec.model import kv_entry_shapes, read_spec
from models.weights.checkpoint import Checkpoint
from planner.placement.slots import ExpertPlacement, contiguous
from tests.support.device_counts import DeviceCounts, LaunchedKernels
from tests.support.tiny_models import Checkpoints

EXPERTS, RANKS, TOP_K, D, F = 128, 8, 8, 256, 64
BF16: Any = {"dtype": torch.bfloat16, "device": "meta"}
KEY = TaskKey(1, 0, 0, Priority.LS)


def channel() -> Any:
    """Return an endpoint with memory on the device. sent: (peer, header, tensors)."""
    sent: list[Any] = []
    arrived: list[Packet] = []

    def reserve(peer: str, parts: list[TensorSpec]) -> Reservation:
        made = [torch.empty(p.shape, dtype=p.torch_dtype, device="meta") for p in parts]
        return Reservation(peer, tuple(parts), lay_out(parts), made)

    def commit(reserved: Reservation, header: Header) -> None:
        sent.append((reserved.peer, header, reserved.tensors))

    return SimpleNamespace(
        name="attention-0", epoch=1, clock=lambda: 0.0,
        sent=sent, arrived=arrived, reserve=reserve, commit=commit,
        poll=lambda timeout_s: [arrived.pop() for _ in range(len(arrived))],
    )  # fmt: skip


# Launches of a layer's parts, with torch's operations and with triton's kernels.
@pytest.mark.parametrize(("triton", "bounds"), [(False, (44, 20, 43)), (True, (28, 12, 16))])
@pytest.mark.parametrize(("tokens", "groups"), [(32, 1), (4096, 1), (4096, 2)])
def test_layer_reads_nothing_on_the_host(
    triton: bool, bounds: tuple[int, int, int], tokens: int, groups: int
) -> None:
    endpoint = channel()
    placement = ExpertPlacement(contiguous(EXPERTS, RANKS, num_layers=1, moe_layers=[0]))
    names = [f"expert-{rank}" for rank in range(RANKS)]
    source = TopologySource(Topology(0, placement, tuple(names)))
    backend = RemoteBackend(endpoint, source, Timeline(99))
    x_TD, hidden_TD = (torch.empty(tokens, D, **BF16) for _ in range(2))
    ids_TK = torch.empty(tokens, TOP_K, dtype=torch.int64, device="meta")
    routed = RoutedTokens(x_TD, ids_TK, torch.empty(tokens, TOP_K, device="meta"))
    plan = Plan(r2=groups)
    backend.drop(backend.dispatch(KEY, hidden_TD, routed, plan))  # copies the placement once
    endpoint.sent.clear()
    counts = [DeviceCounts() for _ in range(3)]
    kernels = LaunchedKernels() if triton else None
    with patch.object(fused_ops, "fused_kernels", lambda x: kernels):
        with counts[0].beside(kernels):
            pending = backend.dispatch(KEY, hidden_TD, routed, plan)
        for peer, header, tensors in endpoint.sent:
            answer = Header(PacketKind.E2A, 1, 1, 0, 0, header.token_group)
            reply = [torch.empty_like(tensors[0])]
            endpoint.arrived.append(Packet(peer, answer, reply, 0.0, None))
        backend.poll(0.0, idle=False)
        with counts[1].beside(kernels):
            run_to_end(backend.combine(hidden_TD, pending, None))
        shapes = (EXPERTS // RANKS, 2 * F, D), (EXPERTS // RANKS, D, F)
        gate_up, down = (linears(torch.empty(shape, **BF16)) for shape in shapes)
        layer = ExpertLayer(gate_up, down)
        spec: Any = None
        half = ExpertHalf(spec, {0: range(EXPERTS // RANKS)}, {0: layer})
        peer, header, tensors = endpoint.sent[0]
        received = [Packet(peer, header, tensors, 0.0, None) for _ in range(3)]
        with counts[2].beside(kernels):
            run_to_end(ResidentExperts(half).begin(received, merge(received).pairs).steps)
    packets = RANKS * groups
    more = (packets - RANKS) * (1 if triton else 3) + 6 * (groups - 1)
    allowed = bounds[0] + more, bounds[1] + (1 if triton else 2) * (packets - RANKS), bounds[2]
    found = [each.launches for each in counts]
    assert all(one <= most for one, most in zip(found, allowed, strict=True)), (found, allowed)
    assert [each.host_reads + each.copies for each in counts] == [0, 0, 0]


@pytest.mark.parametrize("storage", [Storage.PLAIN, Storage.MXFP4, Storage.FP8, Storage.INT8])
def test_experts_in_memory_of_their_own_are_read_where_they_are(storage: Storage) -> None:
    """As loaded where experts move, and as stored: no host read, no temporary as large as one."""
    experts, ffn, rows = EXPERTS // RANKS, 1024, 4

    def product(N: int, K: int) -> Product:
        if storage is Storage.PLAIN:
            return PackedLinear(torch.empty(N, K, **BF16))
        stored: Any = {
            "dtype": torch.int8 if storage is Storage.INT8 else torch.uint8,
            "device": "meta",
        }
        if storage is Storage.MXFP4:
            blocks = torch.empty(N, K // 32, 16, **stored)
            return StoredLinear(storage, blocks, torch.empty(N, K // 32, **stored), None)
        scales = torch.empty(N, -(-K // 128), device="meta")
        return StoredLinear(storage, torch.empty(N, K, **stored), scales, None)

    shapes = (2 * ffn, D), (D, ffn)
    made = [ExpertLinears([product(*shape) for _ in range(experts)], None) for shape in shapes]
    spec: Any = None
    half = ExpertHalf(spec, {0: range(experts)}, {0: ExpertLayer(made[0], made[1])})
    pairs = torch.empty(rows, 2 * TOP_K, dtype=torch.int32, device="meta")
    counts_e = torch.empty(experts, dtype=torch.int32, device="meta")
    header = Header(PacketKind.A2E, 1, 1, 0, 0, 0)
    tensors = [torch.empty(rows, D, **BF16), pairs, counts_e]
    received = [Packet("attention-0", header, tensors, 0.0, None) for _ in range(3)]
    kernels, counts = LaunchedKernels(), DeviceCounts()
    with patch.object(fused_ops, "fused_kernels", lambda x: kernels), counts.beside(kernels):
        run_to_end(ResidentExperts(half).begin(received, merge(received).pairs).steps)
    assert (counts.host_reads, counts.copies) == (0, 0)
    assert counts.launches <= 16
    assert counts.largest < 2 * ffn * D * 2


# Launches of a layer with rows and without, of one worker of two, with torch's operations.
@pytest.mark.parametrize(("tokens", "bound"), [(4096, 74), (0, 14)])
def test_layer_of_all_to_all_reads_nothing_on_the_host(tokens: int, bound: int) -> None:
    endpoint, workers = channel(), ["prefill-0", "prefill-1"]
    endpoint.name, endpoint.peers, answered = workers[0], lambda: workers[1:], 0
    placement = contiguous(EXPERTS, 2, num_layers=1, moe_layers=[0])
    shapes = (EXPERTS // 2, 2 * F, D), (EXPERTS // 2, D, F)
    gate_up, down = (linears(torch.empty(shape, **BF16)) for shape in shapes)
    spec: Any = SimpleNamespace(top_k=TOP_K)
    half = ExpertHalf(spec, {0: range(EXPERTS // 2)}, {0: ExpertLayer(gate_up, down)})

    def poll(timeout_s: float) -> list[Packet]:
        """The other worker does what this one did."""
        nonlocal answered
        new, answered = endpoint.sent[answered:], len(endpoint.sent)
        return [Packet(workers[1], header, tensors, 0.0, None) for _, header, tensors in new]

    endpoint.poll = poll
    group = AllToAll(endpoint, workers, half, placement, Timeline(99))
    x_TD = torch.empty(tokens, D, **BF16)
    ids_TK = torch.empty(tokens, TOP_K, dtype=torch.int64, device="meta")
    routed = RoutedTokens(x_TD, ids_TK, torch.empty(tokens, TOP_K, device="meta"))
    run_to_end(group.sums(0, routed))  # copies the placement once
    with DeviceCounts() as counts:
        if tokens:
            assert run_to_end(group.sums(0, routed)).shape == x_TD.shape
        else:
            run_to_end(group.participate(0, x_TD))
    assert (counts.host_reads, counts.copies) == (0, 0)
    assert counts.launches <= bound


def scattered(context: int, start: int) -> list[SequenceSlice]:
    """Return 32 sequences of `context` tokens of which those from `start` on are new."""
    blocks = -(-context // 16)
    tables = [[n, *range(100 * n + 100, 100 * n + 99 + blocks)] for n in range(32)]
    return [SequenceSlice([1] * (context - start), start, table) for table in tables]


# Copies that prepare 32 sequences, and launches of a layer; with a gathered context, 34 copies and
# 32 host reads (latent) or 64 (sinks, two windows), and 47, 216 and 60 launches.
@pytest.mark.parametrize(
    ("family", "copies", "launches"),
    [("qwen3_moe", 1, 46), ("deepseek_v3", 1, 78), ("gpt_oss", 2, 44)],
)
@pytest.mark.parametrize(("context", "start"), [(1000, 999), (60_000, 59_999), (9000, 8990)])
def test_attention_of_a_batch_reads_nothing_on_the_host(
    tiny_checkpoint: Checkpoints, family: str, copies: int, launches: int, context: int, start: int
) -> None:
    folder: Path = tiny_checkpoint(family, **({} if family == "deepseek_v3" else {"head_dim": 16}))
    spec = read_spec(folder)
    half = AttentionHalf.load(Checkpoint(folder), spec, **BF16)
    kv = KvPool(spec, 8192, 16, **BF16)
    kernels = LaunchedKernels()
    building, preparing, layer = (DeviceCounts() for _ in range(3))
    with patch.object(paged_attention, "attention_kernels", lambda x: kernels):
        with building:
            batch = AttentionBatch.build(scattered(context, start), block_tokens=16, device="meta")
        with preparing:
            half.prepare(batch)
        hidden_TD = half.embed(batch)
        with layer.beside(kernels):
            run_to_end(half.steps(spec.moe_layers[-1], hidden_TD, batch, kv))
    assert [each.host_reads for each in (building, preparing, layer)] == [0, 0, 0]
    assert (building.copies, layer.copies) == (1, 0)
    assert preparing.copies <= copies
    assert layer.launches <= launches
    entries = sum(math.prod(shape) for shape in kv_entry_shapes(spec, spec.moe_layers[-1]))
    context_bytes = 32 * context * entries * 2
    assert max(each.largest for each in (building, preparing, layer)) <= context_bytes / 8


def test_a_captured_layer_is_six_launches_and_a_replay(tiny_checkpoint: Checkpoints) -> None:
    """Copies of the residual and of the results. A batch's numbers are copied once."""
    folder = tiny_checkpoint("qwen3_moe")
    spec = read_spec(folder)
    half = AttentionHalf.load(Checkpoint(folder), spec, **BF16)
    kv, replays = KvPool(spec, 8192, 16, **BF16), list[int]()
    counts = [DeviceCounts() for _ in range(spec.num_layers)]

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: replays.append(1)

    kernels = LaunchedKernels()
    with patch.object(paged_attention, "attention_kernels", lambda x: kernels):
        graphs = DecodeGraphs(half, kv, record)
        for again in range(2):
            batch = AttentionBatch.build(scattered(1000, 999), block_tokens=16, device="meta")
            half.prepare(batch)
            hidden_TD = half.embed(batch)
            for layer in range(spec.num_layers):
                with counts[layer] if again else nullcontext():
                    graphs.attend(layer, hidden_TD, batch)
    assert len(replays) == 2 * spec.num_layers
    assert [(each.copies, each.host_reads) for each in counts] == [(1, 0)] + [(0, 0)] * (
        spec.num_layers - 1
    )
    assert [each.launches for each in counts] == [8, *[5] * (spec.num_layers - 1)]


def test_sampling_reads_once_for_a_batch() -> None:
    """Before: two reads for the batch, and up to six for each sequence."""
    settings = [
        Sampling(seed=n, logprobs=n % 2 or None, top_p=0.5 + n % 3, frequency_penalty=n % 2)
        for n in range(64)
    ]
    sequences = []
    for sampling in settings:
        submit = Submit(request_id=1, token_ids=[1, 2, 3], sampling=sampling)
        sequences.append(Sequence((0, 1), submit, 4))
    with DeviceCounts() as counts:
        TokenSampler(torch.empty(64, 1000, device="meta"), sequences)
    assert counts.host_reads == 1
