"""Experts gathered between GPUs: real threads and sockets, with memory of the CUDA model."""

import gc
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.channels import cuda
from actors.channels.listener import ADDRESS_SEPARATOR as SEPARATOR
from actors.channels.local_process import LocalProcess
from actors.gather import device_segment, nccl_exchange
from actors.gather.peer_source import PeerSource
from contracts.errors import ChannelError, HandshakeError, PeerError
from models.experts.expert_layout import ExpertBuffer
from models.weights.checkpoint import check_checkpoint
from tests.support import prefill_workers
from tests.support.channels_support import nothing_leaks  # noqa: F401
from tests.support.cuda_model import CUPY, FreeModel, Nccl, Runtime, installed
from tests.support.gather_workload import GpuLayout
from tests.support.group_harness import group_config, until
from tests.support.prefill_workers import (
    join_all,
    layout_of,
    make_source,
    unlinked,
    worker_spec,
)
from tests.support.tiny_models import Checkpoints


@pytest.fixture(autouse=True)
def free_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreeModel]:
    monkeypatch.setattr(device_segment, "require_cupy", lambda backend: CUPY)
    fake = Nccl()
    monkeypatch.setattr(nccl_exchange, "require_nccl", lambda: fake)
    with installed():
        monkeypatch.setattr(nccl_exchange, "empty_bytes", cuda.empty_bytes)
        yield FreeModel()


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3_moe", num_hidden_layers=4)


@contextmanager
def on_gpus(
    folder: Path, workers: int, window: int | None = None, backend: str = "ipc", **settings: float
) -> Iterator[list[PeerSource]]:
    config = group_config(prefill={"experts": "gathered"}, channel=settings)
    layout = GpuLayout(check_checkpoint(folder))
    with unlinked(
        folder, workers, backend=backend, window=window, layout=layout, config=config
    ) as sources:
        if backend == "nccl":  # as on other nodes: no Unix socket
            reached = {each.name: each.listen("127.0.0.1").split(SEPARATOR)[1] for each in sources}
            for source in sources:
                source.connect(reached)
        else:
            join_all(sources)
        yield sources


def check_copy(folder: Path, source: PeerSource, layer: int) -> None:
    layout = GpuLayout(check_checkpoint(folder))
    prefill_workers.check_copy(folder, source, layer, packed=False, layout=layout)


def are_all_counted(sources: list[PeerSource]) -> bool:
    """Return whether the senders have counted what has been received: they do so afterwards."""
    sent, received = map(sum, zip(*(each.bytes_moved() for each in sources), strict=True))
    return bool(sent == received > 0)


@pytest.mark.parametrize(
    ("family", "window"), [("qwen3_moe", None), ("qwen3_moe", 1), ("gpt_oss", 2)]
)
def test_workers_copy_from_each_others_memory(
    tiny_checkpoint: Checkpoints, family: str, window: int | None
) -> None:
    folder = tiny_checkpoint(family, num_hidden_layers=4)
    layers = check_checkpoint(folder).moe_layers[1:]
    with on_gpus(folder, 3, window) as sources:
        for step in range(2 * len(layers)):
            for shift, source in enumerate(sources):
                check_copy(folder, source, layers[(step + shift) % len(layers)])
        assert [source.fallbacks for source in sources] == [0, 0, 0]
        until(lambda: are_all_counted(sources))


@pytest.mark.parametrize(("family", "window"), [("qwen3_moe", None), ("gpt_oss", 2)])
def test_workers_on_several_nodes_gather_by_nccl(
    tiny_checkpoint: Checkpoints, family: str, window: int | None
) -> None:
    folder = tiny_checkpoint(family, num_hidden_layers=4)
    layers = check_checkpoint(folder).moe_layers[1:]
    with on_gpus(folder, 3, window, "nccl") as sources:
        for step in range(2 * len(layers)):
            for shift, source in enumerate(sources):
                check_copy(folder, source, layers[(step + shift) % len(layers)])
        assert [(source.fallbacks, source.lost) for source in sources] == [(0, {})] * 3
        assert all(link.in_turn for source in sources for link in source._links.values())
        until(lambda: are_all_counted(sources))
        sources[1].close()
        check_copy(folder, sources[0], layers[0])
        assert list(sources[0].lost) == ["prefill-1"]


def test_a_transfer_that_fails_comes_from_the_fallback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_gpus(folder, 2, backend="nccl") as sources:
        monkeypatch.setattr(Nccl, "broken", True)
        check_copy(folder, sources[0], 1)
        assert sources[0].fallbacks == 1
        assert "prefill-1: NCCL failed: unhandled system error" in sources[0].lost["prefill-1"]


def refuse_to_open(runtime: Runtime, handle: bytes) -> int:
    raise RuntimeError("cudaErrorMapBufferObjectFailed")


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (LocalProcess, "is_ending", True, "prefill-1 closed its connection"),
        (Runtime, "ipcOpenMemHandle", refuse_to_open, "cudaErrorMapBufferObjectFailed"),
    ],
    ids=["ending process", "memory that cannot be opened"],
)
def test_part_that_cannot_be_copied_comes_from_the_fallback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, value: Any, reason: str
) -> None:
    with on_gpus(folder, 2) as sources:
        monkeypatch.setattr(owner, name, value)
        check_copy(folder, sources[0], 1)
        assert reason in sources[0].lost["prefill-1"]
        assert sources[0].fallbacks == 1


def test_copy_that_does_not_end_loses_its_peer_and_then_names_the_layer(
    folder: Path, free_model: FreeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(
        Runtime, "ipcCloseMemHandle", lambda runtime, pointer: closed.append(pointer)
    )
    buffer = ExpertBuffer(GpuLayout(check_checkpoint(folder)))
    waits = iter([lambda *_: None])  # the buffer is free

    def wait(*given: object) -> None:
        next(waits, cuda.wait_for_stream)(*given)  # type: ignore[arg-type]

    heartbeat = {"heartbeat_timeout_s": 0.3, "heartbeat_interval_s": 0.1}
    with on_gpus(folder, 2, None, "ipc", **heartbeat, connect_timeout_s=0.6) as sources:
        check_copy(folder, sources[0], 1)
        monkeypatch.setattr("actors.gather.peer_source.wait_for_stream", wait)
        free_model.held = True
        expected = r"experts of layer 2: the GPU has not completed it in 0\.6"
        with pytest.raises(ChannelError, match=expected):
            sources[0].copy(2, buffer)
        lost = sources[0].lost["prefill-1"]
        assert "copy from the GPU of prefill-1 has not ended in 0.3 s" in lost
        gc.collect()
        assert not closed, "memory is open while it may be read"
        free_model.end_held()


def test_nccl_id_that_is_too_long_is_an_error_of_its_connection(free_model: FreeModel) -> None:
    device = free_model.host.current.device
    exchange = nccl_exchange.NcclExchange("prefill-1", device, 64, 5.0)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack("<I", 4097))
        with pytest.raises(PeerError) as refused:
            exchange.connect(here, "prefill-0", serves=False)
    assert refused.value.message == "prefill-0 sends an NCCL id of 4097 bytes: at most 4096"


def test_worker_on_a_cpu_is_refused(folder: Path) -> None:
    spec = worker_spec(folder, 0, 2, backend="ipc")
    on_gpu = make_source(spec, layout=GpuLayout(check_checkpoint(folder)))
    spec = worker_spec(folder, 1, 2, backend="shm")
    on_cpu = make_source(spec, layout=layout_of(folder, packed=False))
    address = on_gpu.listen("127.0.0.1")
    with pytest.raises(HandshakeError, match="computes on a GPU, the other does not"):
        on_cpu.connect({"prefill-0": address})
    for source in (on_gpu, on_cpu):
        source.close()
