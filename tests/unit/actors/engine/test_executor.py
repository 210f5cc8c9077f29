"""The executor's event loop with a fake model half and a fake endpoint."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.batching.batch_builder import Chunk, ScheduledBatch
from actors.batching.sequence import Sequence as TokenSequence
from actors.channels.base import Header, Packet, PacketKind, PeerLost, TensorSpec
from actors.engine.executor import Executor, ExecutorParts
from actors.engine.micro_batch import BatchPart, cut_batch
from actors.moe.backend import Topology, TopologySource
from actors.moe.remote_backend import RemoteBackend
from actors.telemetry.telemetry import Timeline
from contracts.errors import PeerDeadError, PeerHungError
from contracts.messages import Submit
from contracts.plan import Order, Plan
from contracts.requests import Priority
from contracts.traces import Stage
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch, BlockCopy
from models.decoder.decoder import AttentionOutput
from models.experts.expert_half import RoutedTokens
from planner.placement.slots import ExpertPlacement, contiguous
from planner.scheduling.task_order import Preemption, Task
from tests.support.manual_clock import ManualClock

LAYERS, EXPERTS, TOP_K, DIM = 2, 4, 2, 6
RANKS = ["expert-0", "expert-1"]
BLOCK = 16
TOKENS = 5  # of each sequence
Event = tuple[str, int, int]  # what, layer, whose (-1: a shared expert does not know)


def expert(number: int, x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD * (number + 1)


class FakeHalf:
    """Adds 1 in every layer, then experts and a shared expert; token ids encode the sequence."""

    def __init__(self, log: list[Event], *, shared: bool) -> None:
        self.spec = SimpleNamespace(num_layers=LAYERS)
        self._log = log
        self._with_shared = shared
        self._sequence = -1
        self._layer = -1

    def embed(self, batch: AttentionBatch) -> torch.Tensor:
        return batch.token_ids_T[:, None].float().repeat(1, DIM)

    def prepare(self, batch: AttentionBatch) -> None:
        """Nothing is needed."""

    def steps(
        self,
        layer: int,
        hidden_TD: torch.Tensor,
        batch: AttentionBatch,
        kv: object,
        last: object = None,
    ) -> Steps[AttentionOutput]:
        yield
        self._sequence = int(batch.token_ids_T[0]) // 10
        self._log.append(("attend", layer, self._sequence))
        hidden_TD += 1.0
        ids_TK, weights_TK = route(batch.token_ids_T, layer)
        return AttentionOutput(hidden_TD, RoutedTokens(hidden_TD / 2, ids_TK, weights_TK))

    def residual(self, hidden_TD: torch.Tensor, batch: AttentionBatch) -> Steps[torch.Tensor]:
        yield from ()
        return hidden_TD

    def has_shared(self, layer: int) -> bool:
        return self._with_shared

    def shared_steps(self, layer: int, x_TD: torch.Tensor) -> Steps[torch.Tensor]:
        self._log.append(("shared", layer, -1))
        yield from ()
        return x_TD * 10.0


def route(token_ids_T: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = (token_ids_T + layer) % EXPERTS
    ids_TK = torch.stack([first, (first + 1 + token_ids_T % 2) % EXPERTS], 1)
    return ids_TK, torch.stack([first * 0.25 + 0.1, first * 0.5 + 0.2], 1).float()


def reference(token_ids: list[int], *, shared: bool) -> torch.Tensor:
    """Compute the same layers plainly."""
    ids_T = torch.tensor(token_ids)
    hidden_TD = ids_T[:, None].float().repeat(1, DIM)
    for layer in range(LAYERS):
        hidden_TD = hidden_TD + 1.0
        x_TD = hidden_TD / 2
        ids_TK, weights_TK = route(ids_T, layer)
        out_TD = x_TD * 10.0 if shared else torch.zeros_like(x_TD)
        for token in range(len(token_ids)):
            for k in range(TOP_K):
                number = int(ids_TK[token, k])
                out_TD[token] += weights_TK[token, k] * expert(number, x_TD[token])
        hidden_TD = hidden_TD + out_TD
    return hidden_TD


class FakeEndpoint:
    """Keeps packets in `sent`; `reply` answers as the expert ranks would."""

    name, epoch, backend = "attention-0", 1, "fake"

    def __init__(self, log: list[Event], placement: ExpertPlacement) -> None:
        self.sent: list[tuple[Header, str, list[torch.Tensor]]] = []
        self.sent_total, self.clock = 0, ManualClock()
        self.arrived: list[Any] = []
        self.released: list[Header] = []
        self.lost: PeerDeadError | None = None
        self._log = log
        self._placement = placement

    def reserve(self, peer: str, parts: Sequence[TensorSpec]) -> Any:
        if self.lost is not None and self.lost.peer == peer:
            raise self.lost
        tensors = [torch.empty(part.shape, dtype=part.torch_dtype) for part in parts]
        return SimpleNamespace(peer=peer, tensors=tensors)

    def commit(self, reservation: Any, header: Header) -> None:
        self.sent_total += 1
        self._log.append(("a2e", header.layer, header.micro_batch))
        self.sent.append((header, reservation.peer, reservation.tensors))

    def poll(self, timeout_s: float) -> list[Any]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def reply(self, wanted: Callable[[Header], bool] = lambda header: True) -> None:
        """Answer the `wanted` packets, the last one first."""
        answers = [item for item in self.sent if wanted(item[0])]
        self.sent = [item for item in self.sent if not wanted(item[0])]
        for header, peer, (x_UD, index_N, weights_N, counts_e) in reversed(answers):
            first = self._placement.layer(header.layer).bounds[RANKS.index(peer)][0]
            y_UD, pair = torch.zeros_like(x_UD), 0
            for local, count in enumerate(counts_e.tolist()):
                for _ in range(count):
                    row = int(index_N[pair])
                    y_UD[row] += weights_N[pair] * expert(first + local, x_UD[row])
                    pair += 1
            back = Header(
                PacketKind.E2A,
                header.epoch,
                header.batch,
                header.layer,
                header.micro_batch,
                header.token_group,
                header.priority,
            )
            release = lambda head=back: self.released.append(head)  # noqa: E731
            self.arrived.append(Packet(peer, back, [y_UD], 0.0, release))


class Rig:
    """An executor on fakes. log: tasks and sends in order. finished: hidden states."""

    def __init__(self, *, shared: bool = True, choice: Preemption[Task] | None = None) -> None:
        self.log: list[Event] = []
        layers = range(LAYERS)
        placement = ExpertPlacement(
            contiguous(EXPERTS, len(RANKS), num_layers=LAYERS, moe_layers=layers)
        )
        self.endpoint = FakeEndpoint(self.log, placement)
        self.finished: dict[int, torch.Tensor] = {}
        self.timeline = Timeline(1000)
        half: Any = FakeHalf(self.log, shared=shared)
        kv: Any = SimpleNamespace(block_tokens=BLOCK, device=torch.device("cpu"))
        endpoint: Any = self.endpoint
        self.clock, self.reply_timeout_s = self.endpoint.clock, 300.0
        backend = RemoteBackend(
            endpoint,
            TopologySource(Topology(0, placement, tuple(RANKS))),
            self.timeline,
            reply_timeout_s=self.reply_timeout_s,
        )
        parts = ExecutorParts(
            endpoint.name, half, kv, backend, self._sink, self.timeline, self.clock
        )
        self.executor = Executor(parts, chunk_cost=lambda a, b: b - a, choice=choice)

    def _sink(
        self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor
    ) -> Iterable[None]:
        row = 0
        for chunk in chunks:
            count = chunk.stop - chunk.start
            self.finished[chunk.sequence.key[1]] = hidden_TD[row : row + count].clone()
            self.log.append(("finish", LAYERS, chunk.sequence.key[1]))
            row += count
        return ()

    def submit(
        self,
        plan: Plan,
        sequences: Sequence[int],
        *,
        number: int = 0,
        priority: Priority = Priority.LS,
        after: dict[int, set[int]] | None = None,
    ) -> None:
        chunks = [
            Chunk(sequence(index), 0, TOKENS, frozenset((after or {}).get(position, set())))
            for position, index in enumerate(sequences)
        ]
        self.executor.submit(ScheduledBatch(number, priority, chunks), plan)

    def run_ready(self) -> list[ScheduledBatch]:
        """Step until nothing can run without a reply."""
        done: list[ScheduledBatch] = []
        while True:
            before = len(self.log), len(self.endpoint.arrived)
            done.extend(self.executor.step(0.0))
            if (len(self.log), len(self.endpoint.arrived)) == before:
                return done

    def run_all(self) -> list[ScheduledBatch]:
        done: list[ScheduledBatch] = []
        while self.executor.live:
            done.extend(self.run_ready())
            assert self.endpoint.sent or not self.executor.live, "nothing can run any more"
            self.endpoint.reply()
        return done

    def take_log(self) -> list[tuple[str, int]]:
        """Return (task, micro-batch) since the last call; packets count once."""
        taken, self.log[:] = list(self.log), []
        short: list[tuple[str, int]] = []
        for what, _, number in taken:
            item = (what, number)
            if not (what == "a2e" and short and short[-1] == item):
                short.append(item)
        return short


def sequence(index: int) -> TokenSequence:
    token_ids = [10 * index + position for position in range(TOKENS)]
    submit = Submit(request_id=index, token_ids=token_ids, sampling=None)
    made = TokenSequence((0, index), submit, BLOCK)
    made.block_table = [index]
    return made


def stages(rig: Rig, layer: int) -> list[tuple[Stage, int]]:
    kinds = (Stage.ATTENTION, Stage.SHARED)
    spans = [s for s in rig.timeline.spans() if s.stage in kinds and s.layer == layer]
    return [(span.stage, span.micro_batch) for span in spans]


A, S = Stage.ATTENTION, Stage.SHARED


# --- FinDEP, Figure 3


@pytest.mark.parametrize(
    ("plan", "spans", "tasks"),
    [
        (
            Plan(ma=1, r1=3, order=Order.ASAS),
            [(A, 0), (S, 0), (A, 1), (S, 1), (A, 2), (S, 2)],
            ["attend", "a2e", "shared"] * 3,  # A2E leaves before the shared expert runs
        ),
        (
            Plan(ma=1, r1=3, order=Order.AASS),
            [(A, 0), (A, 1), (A, 2), (S, 0), (S, 1), (S, 2)],
            ["attend", "a2e"] * 3 + ["shared"] * 3,
        ),
        (Plan(order=Order.NAIVE), [(A, 0)], ["attend", "shared", "a2e"]),
        (
            Plan(ma=1, r1=3, order=Order.PPPIPE),
            [(A, 0), (A, 1), (A, 2)],
            ["attend", "shared", "a2e"] * 3,
        ),
    ],
    ids=["asas", "aass", "naive", "pppipe"],
)
def test_tasks_of_each_layer_run_in_the_order_of_the_plan(
    plan: Plan, spans: list[tuple[Stage, int]], tasks: list[str]
) -> None:
    rig = Rig()
    rig.submit(plan, [0, 1, 2])
    for layer in range(LAYERS):
        rig.run_ready()
        assert stages(rig, layer) == spans
        assert [what for what, _ in rig.take_log()] == tasks
        assert {header.layer for header, _, _ in rig.endpoint.sent} == {layer}
        rig.endpoint.reply()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(order=Order.NAIVE),
        Plan(ma=2, r1=2, order=Order.PPPIPE),
        *(
            Plan(r1=r1, r2=r2, order=o)
            for o in (Order.ASAS, Order.AASS)
            for r1, r2 in ((1, 3), (3, 2))
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Plan) else str(value),
)
def test_every_order_gives_reference_hidden_states(plan: Plan, shared: bool) -> None:
    rig = Rig(shared=shared)
    rig.submit(plan, [0, 1, 2, 3])
    (done,) = rig.run_all()
    assert done.number == 0
    for index in range(4):
        expected = reference(sequence(index).token_ids, shared=shared)
        torch.testing.assert_close(rig.finished[index], expected)
    assert not rig.endpoint.sent
    assert len(rig.endpoint.released) == rig.endpoint.sent_total, "each reply, once"


# --- the ready set


def test_micro_batch_waits_for_attention_of_shared_blocks() -> None:
    rig = Rig(shared=False)
    rig.submit(Plan(ma=1, r1=3), [0, 1, 2], after={1: {0}})
    rig.run_ready()
    rig.take_log()
    rig.endpoint.reply(lambda header: header.micro_batch != 0)
    rig.run_ready()
    assert rig.take_log() == [("attend", 2), ("a2e", 2)], "1 has its replies, but needs 0's K and V"
    rig.endpoint.reply(lambda header: header.micro_batch == 0)
    rig.run_ready()
    assert rig.take_log() == [("attend", 0), ("a2e", 0), ("attend", 1), ("a2e", 1)]


@pytest.mark.parametrize("order", [Order.ASAS, Order.AASS])
def test_latency_sensitive_work_runs_at_next_task(order: Order) -> None:
    rig = Rig()
    rig.submit(Plan(ma=1, r1=4, order=order), [0, 1, 2, 3], number=0, priority=Priority.BE)
    rig.executor.step(0.0)
    assert rig.take_log()[0] == ("attend", 0)
    rig.submit(Plan(order=order), [7], number=1, priority=Priority.LS)
    rig.executor.step(0.0)
    assert rig.take_log()[0] == ("attend", 7)
    rig.executor.step(0.0)
    assert stages(rig, 0)[-1] == (S, 0)
    spans = rig.timeline.spans()
    assert [span.batch for span in spans[-2:]] == [1, 1]
    rig.run_all()
    finished = [number for what, _, number in rig.log if what == "finish"]
    assert finished[0] == 7
    for index in (0, 1, 2, 3, 7):
        expected = reference(sequence(index).token_ids, shared=True)
        torch.testing.assert_close(rig.finished[index], expected)


# --- failing


def test_failed_batch_releases_held_and_late_replies() -> None:
    rig = Rig(shared=False)
    rig.submit(Plan(ma=1, r1=2), [0, 1])
    rig.run_ready()
    first_peer = rig.endpoint.sent[0][1]
    sent = len(rig.endpoint.sent)
    held = [item for item in rig.endpoint.sent if item[1] == first_peer]
    late = [item for item in rig.endpoint.sent if item[1] != first_peer]
    rig.endpoint.sent = held
    rig.endpoint.reply()
    rig.run_ready()
    assert not rig.endpoint.released
    assert [batch.number for batch in rig.executor.fail_all()] == [0]
    assert len(rig.endpoint.released) == len(held)
    rig.endpoint.sent = late
    rig.endpoint.reply()
    rig.submit(Plan(), [5], number=1)
    rig.run_all()
    late_released = [header for header in rig.endpoint.released if header.batch == 0]
    assert len(late_released) == sent
    torch.testing.assert_close(rig.finished[5], reference(sequence(5).token_ids, shared=False))
    assert set(rig.finished) == {5}


def test_lost_expert_rank_is_named_on_event_and_on_send() -> None:
    error = PeerDeadError("expert-1 closed its connection", "expert-1")
    noticed = Rig()
    noticed.submit(Plan(), [0])
    noticed.endpoint.arrived.append(PeerLost("expert-1", error))
    assert noticed.executor.step(0.0) == []
    assert not noticed.log, "nothing runs for a group that is broken"
    met = Rig()
    met.endpoint.lost = error
    met.submit(Plan(), [0])
    met.executor.step(0.0)
    for rig in (noticed, met):
        assert isinstance(rig.executor.failure, PeerDeadError)
        assert rig.executor.failure.peer == "expert-1"
        assert len(rig.executor.fail_all()) == 1
        assert not rig.executor.live


def test_loss_of_unknown_peer_is_ignored() -> None:
    rig = Rig()
    gone = PeerDeadError("attention-9 closed its connection", "attention-9")
    rig.submit(Plan(), [0])
    rig.endpoint.arrived.append(PeerLost("attention-9", gone))
    assert len(rig.run_all()) == 1
    assert rig.executor.failure is None


def test_silent_expert_rank_is_dropped_at_deadline() -> None:
    rig = Rig(shared=False)
    rig.submit(Plan(order=Order.ASAS), [0, 1])
    rig.run_ready()
    rig.clock.advance(rig.reply_timeout_s / 2)
    rig.endpoint.reply(lambda header: header.micro_batch == 0)
    for packet in rig.endpoint.arrived:
        packet.arrived_s = rig.clock()
    rig.run_ready()
    rig.clock.advance(rig.reply_timeout_s - 1.0)
    rig.run_ready()
    assert rig.executor.failure is None  # they have answered something since
    rig.clock.advance(2.0)
    rig.executor.step(0.0)
    assert isinstance(rig.executor.failure, PeerHungError)
    assert rig.executor.failure.peer in RANKS
    assert "channel.reply_timeout_s" in str(rig.executor.failure)


def batch_of(spans: list[tuple[int, int]], after: dict[int, set[int]] | None = None) -> Any:
    chunks = [
        Chunk(SimpleNamespace(name=index), start, stop, frozenset((after or {}).get(index, ())))  # type: ignore[arg-type]
        for index, (start, stop) in enumerate(spans)
    ]
    return ScheduledBatch(1, Priority.LS, chunks)


def shape(parts: list[BatchPart]) -> list[list[tuple[int, int, int]]]:
    return [
        [(chunk.sequence.name, chunk.start, chunk.stop) for chunk in part.chunks]  # type: ignore[attr-defined]
        for part in parts
    ]


def cut(batch: ScheduledBatch, plan: Plan) -> list[BatchPart]:
    return cut_batch(batch, plan, [float(chunk.stop - chunk.start) for chunk in batch.chunks])


def test_only_first_piece_makes_copies() -> None:
    batch = batch_of([(0, 1), (5, 45)])
    copies = (BlockCopy(3, 9, 0, 5),)
    batch.chunks[1] = batch.chunks[1]._replace(copies=copies)
    parts = cut(batch, Plan(r1=2, sequence_chunks=(0.5, 1.0)))
    assert shape(parts) == [[(1, 5, 25)], [(0, 0, 1), (1, 25, 45)]]
    assert [[chunk.copies for chunk in part.chunks] for part in parts] == [[copies], [(), ()]]


def test_unsuitable_sizes_are_balanced() -> None:
    plan = Plan(r1=2, micro_batch_samples=(1, 3))
    assert [len(part.chunks) for part in cut(batch_of([(0, 10)] * 4), plan)] == [1, 3]
    assert [len(part.chunks) for part in cut(batch_of([(0, 10)] * 6), plan)] == [3, 3]


chunk_ends = st.lists(st.floats(0.05, 0.95), max_size=3, unique=True).map(
    lambda ends: (*sorted(ends), 1.0) if ends else ()
)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=7),
    chunk_ends,
    st.integers(1, 3),
    st.data(),
)
def test_every_token_is_in_one_part_after_its_dependencies(
    spans: list[tuple[int, int]], ends: tuple[float, ...], sets: int, data: st.DataObject
) -> None:
    after = {
        index: data.draw(st.sets(st.integers(0, index - 1), max_size=2))
        for index in range(1, len(spans))
    }
    batch = batch_of([(start, start + count) for start, count in spans], after)
    plan = Plan(order=Order.ASAS, r1=sets * max(1, len(ends)), sequence_chunks=ends)
    parts = cut(batch, plan)
    covered = [
        (name, position)
        for part in shape(parts)
        for name, start, stop in part
        for position in range(start, stop)
    ]
    assert sorted(covered) == [
        (index, position)
        for index, (start, count) in enumerate(spans)
        for position in range(start, start + count)
    ]
    part_of = {pair: number for number, part in enumerate(shape(parts)) for pair in part}
    waits_for: list[set[int]] = []  # also through others
    for number, part in enumerate(parts):
        assert all(other < number for other in part.after)
        waits_for.append(set(part.after).union(*(waits_for[other] for other in part.after)))
        for chunk in part.chunks:
            index = chunk.sequence.name  # type: ignore[attr-defined]
            needed = {p for (name, _, _), p in part_of.items() if name in after.get(index, ())}
            earlier = {p for (name, _, stop), p in part_of.items()
                       if name == index and stop <= chunk.start}  # fmt: skip
            assert (needed | earlier) - {number} <= waits_for[number]
