"""The GPU channels on the model of the CUDA runtime, and the model. Figures are simulated."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.channels import ipc, nccl
from kernels.device import DeviceTimes
from tests.support.channel_workload import PIPELINES, Workload, World, overlap
from tests.support.cuda_model import (
    Communicator,
    CudaModel,
    Event,
    Host,
    ModelError,
    Runtime,
    Stream,
    installed,
    model,
    range_of,
)
from tests.support.gather_workload import (
    HIDDEN,
    REQUIRED_HIDDEN,
    GatherWork,
    GatherWorld,
    gather_code,
    hidden_share,
)
from tests.support.moving_workload import moving_code, moving_symptom
from tests.support.planted_device_bugs import device_bugs, found, is_overlapped
from tests.support.slots_workload import slots_code, slots_symptom

BACKENDS = (nccl, ipc)


@pytest.fixture(autouse=True, scope="module")
def cuda_model() -> Iterator[None]:
    with installed():
        yield


def fails(kind: str, *programs: Callable[[Host], None], **machine: int) -> None:
    named = {f"rank-{number}": program for number, program in enumerate(programs)}
    with pytest.raises(ModelError) as failure:
        CudaModel(0, **machine).run(named)  # type: ignore[arg-type]
    assert failure.value.kind == kind, failure.value


def test_unordered_accesses_of_two_streams_are_a_race_and_an_event_orders_them() -> None:
    def write_and_read(host: Host, is_ordered: bool) -> None:
        memory = [range_of(model().memory.block(64, host.current))]
        host.launch("writer", 5.0, writes=memory)
        written = Event()
        written.record()
        host.current = Stream()
        if is_ordered:
            host.current.wait_event(written)
        host.launch("reader", 5.0, reads=memory)

    fails("race", lambda host: write_and_read(host, False))
    CudaModel(0).run({"rank": lambda host: write_and_read(host, True)})


def test_memory_of_a_caching_allocator_is_reused_on_its_own_stream_only() -> None:
    def reuse(host: Host) -> None:
        host.launch("earlier", 50.0)
        memory = [range_of(model().memory.block(64, host.current))]
        host.current = Stream()
        host.launch("writer", 5.0, writes=memory)

    fails("race", reuse)


def exchange(host: Host, order: tuple[int, int], streams: int, call: str) -> None:
    """Two transfers between two ranks, launched in this order."""
    rank = int(host.name[-1])
    communicators = [Communicator(2, number, rank) for number in range(2)]
    lanes = [Stream() for _ in range(streams)]
    for number in order:
        block = model().memory.block(64, Stream())
        handle = lanes[number % streams].cuda_stream
        getattr(communicators[number], call)(block.data_ptr(), 64, 1, 1 - rank, handle)


@pytest.mark.parametrize(
    ("streams", "machine", "kind"),
    [
        (1, {}, "deadlock"),
        (2, {"sms": 4, "compute_sms": 4}, "deadlock"),  # room for one call on each device
        (2, {"connections": 1}, ""),  # a resident call leaves its hardware queue
        (2, {}, ""),
    ],
)
def test_transfers_in_opposite_orders_deadlock_on_one_stream_or_too_few_processors(
    streams: int, machine: dict[str, int], kind: str
) -> None:
    first = lambda host: exchange(host, (0, 1), streams, "send")  # noqa: E731
    second = lambda host: exchange(host, (1, 0), streams, "recv")  # noqa: E731
    if kind:
        fails(kind, first, second, **machine)
    else:
        CudaModel(0, **machine).run({"rank-0": first, "rank-1": second})  # type: ignore[arg-type]


def test_two_sends_meet_as_a_mismatch_and_a_wait_beside_a_spinning_kernel_as_a_deadlock() -> None:
    both_send = lambda host: exchange(host, (0, 1), 2, "send")  # noqa: E731
    fails("mismatch", both_send, both_send)

    def send_and_wait(host: Host) -> None:
        rank = int(host.name[-1])
        out, back = [Communicator(2, number, rank) for number in range(2)]
        own, other = (out, back) if rank == 0 else (back, out)
        block = model().memory.block(64, Stream())
        own.send(block.data_ptr(), 64, 1, 1 - rank, Stream().cuda_stream)
        host.synchronize()
        target = model().memory.block(64, Stream())
        other.recv(target.data_ptr(), 64, 1, 1 - rank, Stream().cuda_stream)

    fails("deadlock", send_and_wait, send_and_wait)


def test_copies_run_beside_compute_that_occupies_every_processor() -> None:
    def copy(host: Host) -> None:
        host.launch("compute", 100.0)
        source, target = (model().memory.block(64, Stream()) for _ in range(2))
        Runtime().memcpyAsync(target.data_ptr(), source.data_ptr(), 64, 4, Stream().cuda_stream)

    run = CudaModel(0, sms=10, compute_sms=10)
    run.run({"rank": copy})
    assert run.received[0][2] < 100.0


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    work=st.builds(
        Workload,
        layers=st.integers(1, 3),
        micro_batches=st.integers(1, 3),
        groups=st.integers(1, 2),
        attention_ranks=st.integers(1, 2),
        expert_ranks=st.integers(1, 3),
        attention_us=st.sampled_from((5.0, 300.0)),
        expert_us=st.sampled_from((5.0, 300.0)),
        shared_us=st.sampled_from((0.0, 400.0)),
        payload_bytes=st.sampled_from((64, 4000, 30_000)),
        sync=st.sampled_from((0.0, 0.3)),
        two_classes=st.booleans(),
        empty=st.sampled_from((0.0, 0.3)),
        segment_bytes=st.sampled_from((4096, 64 << 10)),
    ),
    seed=st.integers(0, 1 << 30),
    lazy_loading=st.booleans(),
)
def test_any_schedule_ends_without_a_race_a_deadlock_or_a_leak(
    backend: ModuleType, work: Workload, seed: int, lazy_loading: bool
) -> None:
    run = World(work, backend).run(seed, lazy_loading=lazy_loading)
    assert all(host.done for host in run.hosts.values())


@settings(max_examples=25, deadline=None)
@given(
    work=st.builds(
        GatherWork,
        workers=st.integers(1, 4),
        layers=st.integers(2, 4),
        passes=st.integers(1, 3),
        window=st.sampled_from((None, 1, 2)),
        compute_us=st.sampled_from((5.0, 300.0, 6000.0)),
        width=st.sampled_from((4, 32, 100)),
        sync=st.sampled_from((0.0, 0.3)),
        nodes=st.integers(1, 3),
        spin_limit_us=st.just(float("inf")),
    ),
    dies=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_gather_ends_with_its_experts_and_without_a_race(
    work: GatherWork, dies: bool, seed: int
) -> None:
    dies = dies and work.workers > 1
    GatherWorld(work._replace(dies=dies), gather_code()).run(seed)


def test_moved_experts_are_loaded_beside_compute_and_without_a_race() -> None:
    assert not moving_symptom(moving_code(), range(10))


def test_slots_are_filled_beside_compute_and_without_a_race() -> None:
    assert not slots_symptom(slots_code(), range(10))


@pytest.mark.parametrize("kind", HIDDEN)
def test_gathered_experts_are_copied_behind_compute(kind: str) -> None:
    assert hidden_share(gather_code(), HIDDEN[kind]) >= REQUIRED_HIDDEN


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_transfers_overlap_with_compute_as_planned(backend: ModuleType, pipeline: str) -> None:
    shares = overlap(backend, PIPELINES[pipeline])
    assert is_overlapped(shares), shares


def test_spans_are_times_of_the_device_not_of_its_queue() -> None:
    spans: list[tuple[float, float]] = []
    queued_us: list[float] = []

    def launch(host: Host) -> None:
        times = DeviceTimes(host.current.device)
        start = times.mark(1e-6 * model().now_us)
        for duration_us in (3000.0, 2000.0):
            host.launch("attention", duration_us)
            end = times.mark(1e-6 * model().now_us)
            times.measure(start, end, lambda begin, finish: spans.append((begin, finish)))
            start = end
        queued_us.append(model().now_us)
        host.synchronize()
        assert not spans
        times.settle()

    CudaModel(0).run({"rank": launch})
    assert queued_us[0] < 100.0
    (first, second), (third, fourth) = spans
    assert (second - first, fourth - third) == pytest.approx((0.003, 0.002), abs=1e-5)
    assert second == third


def test_no_transfer_waits_on_the_device_for_compute() -> None:
    work = Workload(layers=3, micro_batches=3, attention_us=5000.0, expert_us=5000.0)
    World(work).run(0, spin_limit_us=250.0)


def test_a_best_effort_payload_does_not_delay_a_latency_sensitive_one() -> None:
    run = World(Workload(layers=1, two_classes=True, payload_bytes=400_000)).run(0)
    payloads = [(start, end) for _, start, end in run.received if end - start > 1000.0]
    (first_start, first_end), (second_start, _), *_ = payloads  # both of A2E
    assert first_start < second_start < first_end, "they are under way at the same time"


@pytest.mark.long
@pytest.mark.parametrize("bug", device_bugs(), ids=lambda bug: bug.name)
def test_model_finds_each_planted_bug(bug: object) -> None:
    assert found(bug, range(10))  # type: ignore[arg-type]
