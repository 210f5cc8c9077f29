"""Workers that gather experts from each other, without compute.

`python -m tests.support.prefill_workers FOLDER RANK WORKERS BACKEND TOKEN` is one in a process; it
prints its address and ends when standard input closes.
"""

import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from actors.gather.peer_source import PeerSource, own_part
from actors.gather.weight_shard import Shard
from actors.ranks.rendezvous import contiguous_placements
from contracts.errors import TandemError
from contracts.ranks import Group, RankSpec
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.host_experts import CheckpointParts, HostSource
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.fork_server import ForkedProcess
from tests.support.group_harness import group_config, until
from tests.support.rank_specs import rank_spec

TOKEN = secrets.token_bytes(32)


def worker_spec(
    folder: Path, rank: int, workers: int, *, backend: str, token: bytes = TOKEN, **fields: Any
) -> RankSpec:
    fields.setdefault("config", group_config(prefill={"experts": "gathered"}))
    placements = contiguous_placements(str(folder), prefill_ranks=workers)
    fields.setdefault("placement", placements[Group.PREFILL])
    fields |= {"rank": rank, "prefill_ranks": workers, "backend": backend, "token": token}
    return rank_spec(Group.PREFILL, folder, **fields)


def layout_of(folder: Path, *, packed: bool = True, device: str = "cpu") -> ExpertLayout:
    """Return the layout in float32."""
    return ExpertLayout(
        check_checkpoint(folder), torch.float32, torch.device(device), packed=packed
    )


def make_source(
    spec: RankSpec,
    *,
    window: int | None = None,
    host: HostSource | None = None,
    layout: ExpertLayout | None = None,
) -> PeerSource:
    """Create a source. window: layers of a shard that comes from `host`."""
    folder = Path(spec.model_folder)
    layout = layout or layout_of(folder)
    checkpoint = CheckpointParts(Checkpoint(folder), layout)
    layers = layout.spec.moe_layers[1:]
    shard = Shard(layers, own_part(spec, layout), host or checkpoint, window)
    try:
        return PeerSource(spec, shard, checkpoint)
    except TandemError:
        shard.close()
        raise


def join_all(sources: Sequence[PeerSource]) -> dict[str, str]:
    """Exchange all addresses."""
    addresses = {source.name: source.listen("127.0.0.1") for source in sources}
    for source in sources:
        source.connect(addresses)
    return addresses


@contextmanager
def unlinked(
    folder: Path,
    workers: int,
    *,
    backend: str = "tcp",
    window: int | None = None,
    layout: ExpertLayout | None = None,
    **fields: Any,
) -> Iterator[list[PeerSource]]:
    """Yield the sources of the workers, without links to each other; close them at the end."""
    specs = [worker_spec(folder, r, workers, backend=backend, **fields) for r in range(workers)]
    with ExitStack() as stack:
        made = (make_source(spec, window=window, layout=layout) for spec in specs)
        yield [stack.enter_context(closing(source)) for source in made]


@contextmanager
def gathering(folder: Path, workers: int, **fields: Any) -> Iterator[list[PeerSource]]:
    """Yield the sources of linked workers."""
    with unlinked(folder, workers, **fields) as sources:
        join_all(sources)
        yield sources


def new_buffer(
    folder: Path, *, packed: bool = True, layout: ExpertLayout | None = None
) -> ExpertBuffer:
    buffer = ExpertBuffer(layout or layout_of(folder, packed=packed))
    for piece in buffer.pieces:
        piece.fill_(torch.nan)
    return buffer


def check_copy(
    folder: Path,
    source: PeerSource,
    layer: int,
    *,
    packed: bool = True,
    layout: ExpertLayout | None = None,
) -> None:
    """Copy a layer and compare it with the checkpoint."""
    buffer = new_buffer(folder, packed=packed, layout=layout)
    source.copy(layer, buffer)
    assert_layer(folder, buffer, layer, packed=packed)


def assert_layer(folder: Path, buffer: ExpertBuffer, layer: int, *, packed: bool = True) -> None:
    layout, expected = layout_of(folder, packed=packed), new_buffer(folder, packed=packed)
    parts = CheckpointParts(Checkpoint(folder), layout)
    parts.copy_part(layer, 0, layout.spec.num_experts, expected.pieces)
    for got, wanted in zip(buffer.pieces, expected.pieces, strict=True):
        assert torch.equal(got, wanted)


class Peer:
    """Weights of another process. `process`: to stop or kill."""

    def __init__(self, folder: Path, rank: int, workers: int, backend: str) -> None:
        arguments = str(folder), str(rank), str(workers), backend, TOKEN.hex()
        self.process = ForkedProcess("tests.support.prefill_workers", *arguments)
        self.address = self.process.stdout.readline().decode().strip()

    def stop(self) -> None:
        """Return once all of its threads are stopped."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def peer_process(folder: Path, rank: int, workers: int, backend: str) -> Iterator[Peer]:
    with closing(Peer(folder, rank, workers, backend)) as peer:
        yield peer


if __name__ == "__main__":
    model_folder, rank, workers, backend, token = sys.argv[1:]
    spec = worker_spec(
        Path(model_folder), int(rank), int(workers), backend=backend, token=bytes.fromhex(token)
    )
    device = "cuda:0" if backend == "ipc" else "cpu"
    source = make_source(spec, layout=layout_of(Path(model_folder), device=device))
    sys.stdout.write(source.listen("127.0.0.1") + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    source.close()
