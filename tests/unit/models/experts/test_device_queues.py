"""Queues of a device on the CUDA model: lanes of copies, captured graphs, limits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contracts.errors import ConfigError
from kernels import gpu_experts
from kernels.device import LaunchLimiter
from models.decoder import decode_graphs
from models.decoder.decode_graphs import CudaRecorder, DecodeGraphs
from models.experts.device_lanes import CudaLane, InlineLane, device_lane
from tests.support.cuda_model import CudaModel, Host, Runtime, Stream, installed, model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
COMPUTE_US, BYTES = 100.0, 4000


@pytest.fixture(autouse=True)
def cuda_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty = torch.empty
    with installed():
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        yield


def run(program: Callable[[Host], None]) -> None:
    CudaModel(0).run({"rank": program})


def transfer() -> Callable[[], None]:
    """A copy by the engine on the current stream."""
    source, target = (model().memory.block(BYTES, Stream()).data_ptr() for _ in range(2))

    def copy() -> None:
        Runtime().memcpyAsync(target, source, BYTES, 4, model().host.current.cuda_stream)

    return copy


def test_a_lane_copies_after_its_mark_and_compute_waits_for_it() -> None:
    def program(host: Host) -> None:
        seen: list[tuple[float, float]] = []
        lane = CudaLane(CPU, lambda: 1e-6 * model().now_us)
        host.launch("attention", COMPUTE_US)
        copied = lane.run(transfer(), lane.mark(), lambda *times: seen.append(times))
        assert not lane.has_passed(copied)
        lane.wait(copied)
        host.launch("experts", COMPUTE_US)
        end = lane.mark()
        host.synchronize()
        assert lane.has_passed(end)
        lane.wait(copied)  # passed: nothing is queued
        copy_s = 1e-6 * model().transfer_us(BYTES)
        assert lane.copied_s == pytest.approx(copy_s)
        assert lane.exposed_s == pytest.approx(copy_s)
        assert lane.copies == len(seen) == 1
        assert seen[0][0] >= 1e-6 * COMPUTE_US
        assert seen[0][1] - seen[0][0] == pytest.approx(copy_s)

    run(program)


def test_a_lane_counts_the_device_as_idle_while_the_host_waits() -> None:
    def program(host: Host) -> None:
        lane = CudaLane(CPU)
        with lane.host_wait():
            host.pause(70.0)
        host.synchronize()
        assert lane.exposed_s == pytest.approx(70e-6)

    run(program)


def test_ids_reach_the_host_after_the_compute_before_them() -> None:
    def program(host: Host) -> None:
        lane, ids = CudaLane(CPU), torch.arange(5)
        host.launch("router", COMPUTE_US)
        arrival = lane.fetch(ids)
        assert not arrival.is_ready
        lane.drain()
        assert arrival.is_ready
        assert torch.equal(arrival.tensor, ids)
        assert torch.equal(lane.upload(ids), ids)
        stored, into = torch.ones(3), torch.zeros(3)
        lane.copy([stored], [into], None)
        assert torch.equal(stored, into)

    run(program)


def test_a_gpu_has_queues_and_a_cpu_has_none() -> None:
    run(lambda host: assert_is(device_lane(GPU), CudaLane))
    lane = device_lane(CPU)
    assert_is(lane, InlineLane)
    assert torch.equal(lane.upload(torch.ones(2)), torch.ones(2))
    seen: list[tuple[float, float]] = []
    assert isinstance(lane, InlineLane)
    with lane.host_wait():
        lane.run(lambda: None, None, lambda *times: seen.append(times))
    lane.drain()
    assert (lane.copies, len(seen)) == (1, 1)


def assert_is(each: object, kind: type) -> None:
    assert isinstance(each, kind)


def test_the_host_is_at_most_so_many_steps_ahead() -> None:
    def program(host: Host) -> None:
        limiter = LaunchLimiter(GPU, 2)
        reached = []
        for _ in range(4):
            host.launch("layer", COMPUTE_US)
            limiter.step()
            reached.append(model().now_us - begin)
        assert reached[1] < COMPUTE_US <= reached[2] < 2 * COMPUTE_US <= reached[3]

    begin = 0.0
    run(program)
    LaunchLimiter(CPU, 0).step()  # nothing is queued


class Graph:
    """Takes the place of torch.cuda.CUDAGraph. log: of all calls."""

    log: list[Any]

    def capture_begin(self, **_: object) -> None:
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")

    def replay(self) -> None:
        self.log.append("replay")


def test_calls_are_captured_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(Graph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)

    def program(host: Host) -> None:
        recorder, compute = CudaRecorder(CPU), host.current
        replay = recorder.record(lambda: log.append(host.current is compute))
        assert log == [False, "begin", False, "end"]
        assert host.current is compute
        replay()
        assert log.pop() == "replay"

        def fail() -> None:
            if log[-1] == "begin":
                raise RuntimeError("not permitted while capturing")

        with pytest.raises(RuntimeError, match="capturing"):
            recorder.record(fail)
        assert log[-2:] == ["begin", "end"]

    run(program)


def test_graphs_without_triton_are_off_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_graphs, "attention_kernels", lambda x: None)
    half: Any = SimpleNamespace(device=GPU, joins_later=False, embedding_VD=None)
    pool: Any = None
    assert DecodeGraphs.of(half, pool, None) is None
    assert "needs triton" in caplog.text
    assert DecodeGraphs.of(half, pool, False) is None
    with pytest.raises(ConfigError, match="cuda_graphs=true: it needs triton"):
        DecodeGraphs.of(half, pool, True)


@pytest.mark.parametrize(("major", "groups"), [(8, False), (9, True), (10, True), (12, False)])
def test_grouped_products_need_an_architecture_that_reads_no_counts(
    major: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert gpu_experts._has_grouped_product.__wrapped__(GPU) == groups
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert not gpu_experts._has_grouped_product.__wrapped__(GPU)
