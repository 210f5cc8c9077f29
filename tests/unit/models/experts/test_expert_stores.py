"""Stores that copy experts behind compute, and the host's file of all experts."""

import mmap
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ChannelError, PeerDeadError, ResourceError
from kernels.linear import is_packed
from models.experts.copying_store import CopyingStore
from models.experts.expert_half import ExpertHalf
from models.experts.expert_layout import ExpertBuffer, ExpertLayout
from models.experts.expert_loading import ExpertLayer
from models.experts.host_experts import HostSource, open_host_file, open_host_source
from models.spec.model import ModelSpec
from models.weights.checkpoint import Checkpoint, check_checkpoint
from tests.support.tiny_models import Checkpoints

DEADLINE_S = 30.0
CPU = torch.device("cpu")
PACKED = int(is_packed(torch.float32, CPU))  # 1 if this build has a packed layout


class GatedSource:
    """Fills a buffer with the layer's number once the gate is open. `copies`: started ones."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.copies: list[int] = []
        self.started = threading.Condition()
        self.errors: list[Exception] = []
        self.closed = False

    def copy(self, layer: int, into: ExpertBuffer) -> None:
        with self.started:
            self.copies.append(layer)
            self.started.notify_all()
        assert self.gate.wait(DEADLINE_S)
        if self.errors:
            raise self.errors.pop()
        for tensor in into.pieces:
            tensor.fill_(layer)

    def close(self) -> None:
        self.closed = True
        self.gate.set()

    def wait_for_copies(self, *layers: int) -> None:
        with self.started:
            assert self.started.wait_for(lambda: self.copies == list(layers), DEADLINE_S)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints) -> ModelSpec:
    return check_checkpoint(tiny_checkpoint("qwen3_moe", num_hidden_layers=5))


@contextmanager
def opened(
    model: ModelSpec, source: GatedSource, *, deadline_s: float = DEADLINE_S
) -> Iterator[CopyingStore]:
    """Open a store with layer 0 resident."""
    buffer = ExpertBuffer(ExpertLayout(model, torch.float32, CPU))
    for tensor in buffer.pieces:
        tensor.zero_()
    layout = ExpertLayout(model, torch.float32, CPU)
    store = CopyingStore(source, {0: buffer.layer}, layout, deadline_s=deadline_s)
    try:
        yield store
    finally:
        store.close()


def weight_of(layer: ExpertLayer) -> float:
    """Return the value that fills the weights of `layer`."""
    row = layer.gate_up[0](torch.ones(1, 48)) / 48
    assert torch.equal(row, row[:, :1].expand_as(row))
    return float(row[0, 0])


def test_next_layers_are_copied_ahead(model: ModelSpec) -> None:
    source = GatedSource()
    with opened(model, source) as store:
        source.wait_for_copies(1, 2)
        for _ in range(2):
            assert [weight_of(store.fetch(layer)) for layer in range(5)] == [0, 1, 2, 3, 4]
        store.fetch(0)
        source.wait_for_copies(1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    assert source.closed


@settings(deadline=None, max_examples=30)
@given(requested=st.lists(st.integers(0, 4), max_size=12))
def test_any_fetch_order_returns_requested_layers(model: ModelSpec, requested: list[int]) -> None:
    with opened(model, GatedSource()) as store:
        assert [weight_of(store.fetch(layer)) for layer in requested] == requested


def test_released_buffer_is_filled_before_next_fetch(model: ModelSpec) -> None:
    source = GatedSource()
    with opened(model, source) as store:
        assert weight_of(store.fetch(1)) == 1
        source.wait_for_copies(1, 2)
        store.release()
        source.wait_for_copies(1, 2, 3)
        store.release()  # nothing is held
        assert [weight_of(store.fetch(layer)) for layer in (2, 3)] == [2, 3]


def test_wait_for_slow_source_is_counted_and_ends_at_deadline(model: ModelSpec) -> None:
    source = GatedSource()
    source.gate.clear()
    with opened(model, source) as store:
        assert weight_of(store.fetch(0)) == 0
        assert store.waited_s == 0
        opener = threading.Timer(0.05, source.gate.set)
        opener.start()
        assert weight_of(store.fetch(1)) == 1
        assert store.waited_s > 0.02
        opener.join()
    source = GatedSource()
    source.gate.clear()
    with opened(model, source, deadline_s=0.05) as store:
        with pytest.raises(ChannelError, match=r"layer 1 did not arrive within 0\.05 s"):
            store.fetch(1)
        source.gate.set()
    with pytest.raises(ChannelError, match="closed"):
        store.fetch(1)
    assert not store._thread.is_alive()


def test_source_error_is_raised_by_fetch_and_layer_is_retried(model: ModelSpec) -> None:
    source = GatedSource()
    source.errors = [PeerDeadError("prefill-1 is dead", "prefill-1")]
    with opened(model, source) as store:
        assert weight_of(store.fetch(0)) == 0
        with pytest.raises(PeerDeadError, match="prefill-1 is dead"):
            store.fetch(1)
        assert weight_of(store.fetch(1)) == 1
        source.wait_for_copies(1, 1, 2)
        source.errors = [RuntimeError("disk gone")]
        store.fetch(2)
        with pytest.raises(ChannelError, match="layer 3: RuntimeError: disk gone"):
            store.fetch(3)


@pytest.mark.parametrize(
    ("family", "overrides", "packed", "made"),
    [
        ("qwen3_moe", {}, False, 0),
        ("qwen3_moe", {}, True, PACKED),
        ("qwen3_moe", {"fused": True}, True, PACKED),
        ("qwen3_moe", {"dtype": "bfloat16"}, False, 1),
        ("qwen3_moe", {"dtype": "bfloat16"}, True, 1),
        ("gpt_oss", {}, False, 1),
    ],
)
def test_host_source_equals_checkpoint_and_writes_file_once_if_needed(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    family: str,
    overrides: dict[str, object],
    packed: bool,
    made: int,
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    layout = ExpertLayout(check_checkpoint(folder), torch.float32, CPU, packed=packed)
    buffer, stamps = ExpertBuffer(layout), set()
    for _ in range(2):
        source = open_host_source(folder, layout, store=tmp_path, deadline_s=DEADLINE_S)
        assert_same_products(folder, source, buffer)
        part = [torch.empty_like(piece) for piece in buffer.part(2, 4)]
        source.copy_part(layout.spec.moe_layers[-1], 2, 4, part)
        for got, expected in zip(part, buffer.part(2, 4), strict=True):
            assert torch.equal(got, expected)
        stamps |= {path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}
    assert len(stamps) == len(list(tmp_path.rglob("*.bin"))) == made


def assert_same_products(folder: Path, source: HostSource, buffer: ExpertBuffer) -> None:
    """Check bit-equality with resident experts."""
    spec = check_checkpoint(folder)
    everyone = range(spec.num_experts)
    held = ExpertHalf.load(Checkpoint(folder), spec, everyone, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, h = (
        torch.randn(3, n, generator=generator) for n in (spec.hidden_size, spec.expert_ffn_size)
    )
    for layer in spec.moe_layers:
        source.copy(layer, buffer)
        for expert in everyone:
            for loaded, reference, rows in (
                (buffer.layer.gate_up, held.layer_experts(layer).gate_up, x),
                (buffer.layer.down, held.layer_experts(layer).down, h),
            ):
                assert torch.equal(loaded[expert](rows), reference[expert](rows))


def test_unusable_store_folder_is_named_unless_experts_can_be_packed_on_read(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    (store := tmp_path / "file").touch()
    folder = tiny_checkpoint("qwen3_moe")
    layout = ExpertLayout(check_checkpoint(folder), torch.float32, CPU)
    source = open_host_source(folder, layout, store=store, deadline_s=DEADLINE_S)
    assert_same_products(folder, source, ExpertBuffer(layout))
    folder = tiny_checkpoint("qwen3_moe", dtype="bfloat16")
    layout = ExpertLayout(check_checkpoint(folder), torch.float32, CPU)
    with pytest.raises(ResourceError, match=r"set prefill\.host_store to a folder with \d+ free"):
        open_host_source(folder, layout, store=store, deadline_s=DEADLINE_S)


ROOT = Path(__file__).parents[4]
OURS = f"tandem-{os.getuid()}"  # the private folder
HOLD = """
import mmap, pathlib, signal, sys
from models.experts.host_experts import open_host_file
write = lambda path: path.write_bytes(b"theirs")
with open_host_file(pathlib.Path(sys.argv[1]), "theirs", 6, write, deadline_s=30.0) as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
signal.pause()
"""


def open_named(parent: Path, name: str, *, text: bytes = b"experts") -> IO[bytes]:
    def write(path: Path) -> None:
        path.write_bytes(text)

    return open_host_file(parent, name, len(text), write, deadline_s=DEADLINE_S)


def mapped(parent: Path, name: str) -> mmap.mmap:
    """Return a mapping of the closed file, as in a worker."""
    with open_named(parent, name) as file:
        return mmap.mmap(file.fileno(), 0)


def names(parent: Path) -> set[str]:
    return {path.name for path in (parent / OURS).iterdir() if path.suffix != ".lock"}


@pytest.fixture
def open_default(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], HostSource]:
    """Return a function that opens experts in the default store, below tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tiny_checkpoint("qwen3_moe", dtype="bfloat16")
    layout = ExpertLayout(check_checkpoint(folder), torch.float32, torch.device("cpu"))
    return lambda: open_host_source(folder, layout, store=None, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda at: at.symlink_to(at.with_name("elsewhere")), "is a link"),
        (lambda at: (at.mkdir(), at.chmod(0o777)), "mode 0777"),
        (Path.touch, "or a file"),
    ],
)
def test_default_store_folder_is_private_and_unsafe_ones_are_rejected(
    open_default: Callable[[], HostSource],
    tmp_path: Path,
    plant: Callable[[Path], object],
    message: str,
) -> None:
    open_default().close()
    assert stat.S_IMODE((tmp_path / OURS).lstat().st_mode) == 0o700
    assert len(list((tmp_path / OURS).glob("*.bin"))) == 1
    shutil.rmtree(tmp_path / OURS)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    plant(tmp_path / OURS)
    with pytest.raises(ResourceError, match=r"prefill\.host_store") as caught:
        open_default()
    assert message in str(caught.value)
    assert str(tmp_path / OURS) in str(caught.value)
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_folder_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"tandem-{os.getuid() + 1}").mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ResourceError, match=f"belongs to user {owner}, not to {owner + 1}"):
        open_named(tmp_path, "a")


def test_unused_files_are_deleted_when_another_is_written(tmp_path: Path) -> None:
    mapped(tmp_path, "old").close()
    (tmp_path / OURS / "killed.partial").write_bytes(b"half")
    used = mapped(tmp_path, "used")
    assert names(tmp_path) == {"used.bin"}
    new = mapped(tmp_path, "new")
    assert names(tmp_path) == {"used.bin", "new.bin"}
    assert used[:] == b"experts"
    used.close()
    mapped(tmp_path, "new").close()  # exists: nothing is written or deleted
    assert names(tmp_path) == {"used.bin", "new.bin"}
    new.close()


@pytest.mark.long
def test_file_mapped_by_another_process_stays_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        mapped(tmp_path, "mine").close()
        assert names(tmp_path) == {"theirs.bin", "mine.bin"}
        other.kill()
    mapped(tmp_path, "next").close()
    assert names(tmp_path) == {"next.bin"}


def test_first_process_creates_file_and_others_wait_until_deadline(tmp_path: Path) -> None:
    made: list[int] = []
    met = threading.Barrier(3)

    def write(path: Path) -> None:
        made.append(1)
        path.write_bytes(b"experts")

    def worker() -> None:
        met.wait(DEADLINE_S)
        open_host_file(tmp_path, "a", 7, write, deadline_s=DEADLINE_S).close()

    threads = [threading.Thread(target=worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert made == [1]

    (tmp_path / OURS / "a.bin").unlink()

    def slow(path: Path) -> None:
        with pytest.raises(ResourceError, match=r"a\.lock.*groups\.ready_timeout_s"):
            open_host_file(tmp_path, "a", 7, path.touch, deadline_s=0.0)  # type: ignore[arg-type]
        path.write_bytes(b"experts")

    open_host_file(tmp_path, "a", 7, slow, deadline_s=DEADLINE_S).close()
