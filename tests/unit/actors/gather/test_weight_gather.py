"""Experts gathered from other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import actors.gather.peer_dialer
from actors.gather.weight_link import bytes_of
from contracts.errors import ChannelError, HandshakeError, ResourceError
from models.weights.checkpoint import check_checkpoint
from tests.support.prefill_workers import (
    assert_layer,
    gathering,
    join_all,
    layout_of,
    make_source,
    new_buffer,
    worker_spec,
)

Checkpoints = Callable[..., Path]
LAYERS = {"num_hidden_layers": 4}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "window", "backend"),
    [
        ("qwen3_moe", None, "shm"),
        ("qwen3_moe", 1, "tcp"),
        ("mixtral", None, "tcp"),
        ("mixtral", 2, "shm"),
        ("deepseek_v3", None, "shm"),
        ("deepseek_v3", 2, "tcp"),
        ("gpt_oss", None, "tcp"),
        ("gpt_oss", 1, "shm"),
    ],
)
def test_every_worker_gathers_every_layer_bit_for_bit(
    tiny_checkpoint: Checkpoints, family: str, window: int | None, backend: str
) -> None:
    folder = tiny_checkpoint(family, **LAYERS)
    layers = check_checkpoint(folder).moe_layers[1:]
    for workers in (1, 2, 3):
        with gathering(folder, workers, backend=backend, window=window) as sources:
            for layer in (*layers, *layers):
                for source in sources:
                    buffer = new_buffer(folder)
                    source.copy(layer, buffer)
                    assert_layer(folder, buffer, layer)
            assert all(not source.lost and source.fallbacks == 0 for source in sources)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_workers_at_different_layers_share_a_window_of_one(
    tiny_checkpoint: Checkpoints, backend: str
) -> None:
    folder = tiny_checkpoint("qwen3_moe", **LAYERS)
    layers = check_checkpoint(folder).moe_layers[1:]
    with gathering(folder, 3, backend=backend, window=1) as sources:
        for step in range(2 * len(layers)):
            for shift, source in enumerate(sources):
                layer, buffer = layers[(step + shift) % len(layers)], new_buffer(folder)
                source.copy(layer, buffer)
                assert_layer(folder, buffer, layer)


def test_more_workers_than_experts_leave_some_without_a_part(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("mixtral", num_local_experts=2, num_experts_per_tok=1)
    with gathering(folder, 3, backend="tcp") as sources:
        for source in sources:
            buffer = new_buffer(folder)
            source.copy(1, buffer)
            assert_layer(folder, buffer, 1)


def test_window_holds_at_most_its_configured_layers(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe", num_hidden_layers=9)
    with gathering(folder, 2, backend="shm", window=3) as sources:
        for source in sources:
            slots = source.shard.slots
            assert len(slots.pieces) == 3
            assert slots.payload_bytes < 4 * sum(tensor.nbytes for tensor in slots.pieces[0])
        for layer in range(1, 9):
            buffer = new_buffer(folder)
            sources[1].copy(layer, buffer)
            assert_layer(folder, buffer, layer)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_stranger_is_refused(tiny_checkpoint: Checkpoints, backend: str) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    stranger = make_source(worker_spec(folder, 1, 2, backend=backend, token=b"guessed" * 5))
    with gathering(folder, 2, backend=backend) as sources:
        with pytest.raises(HandshakeError, match=r"cannot join prefill-0: .*wrong token"):
            stranger.connect({"prefill-0": sources[0].address})
        buffer = new_buffer(folder)
        sources[0].copy(1, buffer)
        assert_layer(folder, buffer, 1)
    stranger.close()


@pytest.mark.parametrize(
    ("workers", "num_experts", "message"),
    [
        (3, 7, "prefill-1 has its experts placed as [0-9a-f]{16}, here .* as [0-9a-f]{16}: launch"),
        (2, 9, "another model or dtype"),
    ],
)
def test_model_or_placement_mismatch_is_refused(
    tiny_checkpoint: Checkpoints, workers: int, num_experts: int, message: str
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    other = tiny_checkpoint("qwen3_moe", num_experts=num_experts)
    stray = make_source(worker_spec(other, 1, workers, backend="tcp"))
    expected = pytest.raises(HandshakeError, match=message)
    with gathering(folder, 2, backend="tcp") as sources, expected:
        stray.connect({"prefill-0": sources[0].address})
    stray.close()


def test_layout_mismatch_is_refused(tiny_checkpoint: Checkpoints) -> None:
    """A layout of another processor; plain matrices fit any processor."""
    folder = tiny_checkpoint("qwen3_moe")
    other = layout_of(folder)
    other.digest = b"of another processor"
    stray = make_source(worker_spec(folder, 1, 2, backend="tcp"), layout=other)
    expected = pytest.raises(HandshakeError, match=r"set prefill\.packed_experts=false on all")
    with gathering(folder, 2, backend="tcp") as sources, expected:
        stray.connect({"prefill-0": sources[0].address})
    stray.close()
    plain = layout_of(folder, packed=False)
    sources = [
        make_source(worker_spec(folder, rank, 2, backend="tcp"), layout=plain) for rank in (0, 1)
    ]
    join_all(sources)
    buffer = new_buffer(folder, packed=False)
    sources[0].copy(1, buffer)
    assert_layer(folder, buffer, 1, packed=False)
    for source in sources:
        source.close()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_replaced_worker_is_rejoined_at_its_new_address(
    tiny_checkpoint: Checkpoints, backend: str
) -> None:
    folder = tiny_checkpoint("qwen3_moe", **LAYERS)
    with gathering(folder, 2, backend=backend) as (first, second):
        second.close()
        buffer = new_buffer(folder)
        first.copy(1, buffer)
        assert_layer(folder, buffer, 1)
        assert list(first.lost) == ["prefill-1"]
        assert first.fallbacks == 1
        third = make_source(worker_spec(folder, 1, 2, backend=backend, epoch=2))
        first.connect({"prefill-1": third.listen("127.0.0.1")})
        third.connect({"prefill-0": first.address})
        for source in (first, third):
            buffer = new_buffer(folder)
            source.copy(2, buffer)
            assert_layer(folder, buffer, 2)
        assert not first.lost
        assert first.fallbacks == 1
        late = make_source(worker_spec(folder, 1, 2, backend=backend, epoch=1))
        with pytest.raises(HandshakeError, match="epoch 1, which has been replaced by 2"):
            first.connect({"prefill-1": late.listen("127.0.0.1")})
        late.close()
        third.close()


def test_unreachable_peer_is_replaced_by_the_fallback_until_it_answers(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replacement knows only the second worker's old address."""
    monkeypatch.setattr(actors.gather.peer_dialer, "REDIAL_S", 0.01)
    folder = tiny_checkpoint("qwen3_moe", **LAYERS)
    first, gone = (make_source(worker_spec(folder, rank, 2, backend="tcp")) for rank in (0, 1))
    nowhere = gone.listen("127.0.0.1")
    gone.close()
    first.listen("127.0.0.1")
    first.connect({"prefill-1": nowhere})
    assert "cannot connect" in first.lost["prefill-1"]
    buffer = new_buffer(folder)
    first.copy(1, buffer)
    assert_layer(folder, buffer, 1)
    second = make_source(worker_spec(folder, 1, 2, backend="tcp", epoch=2))
    first.connect({"prefill-1": second.listen("127.0.0.1")})
    first.copy(2, buffer)
    assert_layer(folder, buffer, 2)
    assert not first.lost
    assert first.fallbacks == 1
    first.close()
    second.close()


def test_layer_that_the_host_store_cannot_read_comes_from_the_fallback(
    tiny_checkpoint: Checkpoints,
) -> None:
    folder = tiny_checkpoint("qwen3_moe", **LAYERS)

    class Broken:
        def copy_part(self, layer: int, first: int, last: int, into: object) -> None:
            raise ChannelError("the disk is gone")

    good = make_source(worker_spec(folder, 0, 2, backend="tcp"))
    broken = make_source(worker_spec(folder, 1, 2, backend="tcp"), window=2, host=Broken())
    join_all([good, broken])
    buffer = new_buffer(folder)
    good.copy(1, buffer)
    assert_layer(folder, buffer, 1)
    assert "the disk is gone" in good.lost["prefill-1"]
    with pytest.raises(ChannelError, match="the disk is gone"):
        broken.copy(1, buffer)
    good.close()
    broken.close()


def test_weights_are_gathered_between_cpus_only(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    for backend, device in (("nccl", "cuda:0"), ("shm", "cuda:0")):
        with pytest.raises(ResourceError, match=r"set prefill\.experts to resident or streamed"):
            make_source(worker_spec(folder, 0, 2, backend=backend, device=device))


def test_bfloat16_buffer_is_viewed_as_bytes() -> None:
    tensors = (torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0, 3))
    (view,) = bytes_of(tensors)
    view[:] = bytes(12)
    assert torch.equal(tensors[0], torch.zeros(2, 3, dtype=torch.bfloat16))
