"""Captured layers of decode against the same layers without a capture.

The recorder stands for CUDA graphs: it keeps the operations of a capture with their tensors, and
repeats them on these. Everything else that a capture read on the host is therefore stale, and an
operation that makes the host wait fails. Computation is in float64, which nothing compiled takes.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import kernels.device
from contracts.errors import ConfigError
from kernels import linear, paged_attention, row_ops
from kernels.pages import PagedPart, Pages, Seen
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, SequenceSlice
from models.decoder.decode_graphs import DecodeGraphs
from models.decoder.decoder import AttentionHalf
from models.spec.model import read_spec
from models.weights.checkpoint import Checkpoint
from tests.support.tiny_models import Checkpoints

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
    ("llama4_text", {}),
]


@torch.library.custom_op("tandem_tests::attend", mutates_args=("out",))
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    blocks: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    sizes: list[int],
    scale: float,
) -> None:
    """Attend by torch's operations, with the tiles and blocks that the tensors have now."""
    pages, seen = Pages(blocks, sizes[0]), Seen(sizes[1], bool(sizes[2]), sizes[3])
    host = tiles.numpy().copy()
    part = PagedPart(tiles, host[host[:, 1] > 0], pages, seen, 1, 1, 0)
    paged_attention._attend_by_torch(q, k, v, part, out, scale, sinks)


class Kernels:
    """Stands for kernels/triton_attention.py."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: PagedPart,
        out: Tensor,
        scale: float,
        sinks: Tensor | None,
        partial: tuple[Tensor, Tensor],
    ) -> None:
        seen = part.seen
        sizes = [part.pages.block_tokens, seen.window, seen.chunked, seen.split_keys]
        attend(q, k, v.clone(), part.tiles, part.pages.blocks_BW, out, sinks, sizes, scale)

    def combine(self, *_: Any) -> None:
        """Do nothing: `attend` has combined the splits."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """captures: their number."""

    captures = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.captures += 1
        with self:
            run()
        calls = self._calls

        def replay() -> None:
            for func, args, kwargs, made in calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_iter(made), tree_iter(again), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        result = func(*args, **kwargs)
        assert name not in READS, f"{name} in a capture"
        if not func.is_view and "empty" not in name:
            self._calls.append((func, args, kwargs, result))
        return result


class Rig:
    def __init__(self, folder: Any) -> None:
        spec = read_spec(folder)
        self.half = AttentionHalf.load(Checkpoint(folder), spec, dtype=torch.float64)
        self.kv, self.other = (KvPool(spec, 128, 4, torch.float64) for _ in range(2))
        self.recorder = Recorder()  # type: ignore[no-untyped-call]
        self.graphs = DecodeGraphs(self.half, self.kv, self.recorder.record)
        generator = torch.Generator().manual_seed(1)
        for layer in range(spec.num_layers):
            for one, two in zip(self.kv.entries(layer), self.other.entries(layer), strict=True):
                one.copy_(torch.randn(one.shape, generator=generator))
                two.copy_(one)

    def compare(self, contexts: list[int], seed: int) -> None:
        """Run all layers of sequences with these contexts captured, and eagerly."""
        order = np.random.default_rng(seed).permutation(127) + 1
        tables = np.split(order, np.cumsum([-(-each // 4) for each in contexts]))
        slices = [
            SequenceSlice([seed + row], context - 1, tables[row].tolist())
            for row, context in enumerate(contexts)
        ]
        batch, plain = (AttentionBatch.build(slices, block_tokens=4) for _ in range(2))
        assert self.graphs.accepts(batch)
        hidden_TD, expected_TD = self.half.embed(batch), self.half.embed(plain)
        for layer in range(self.half.spec.num_layers):
            found = self.graphs.attend(layer, hidden_TD, batch)
            expected = self.half.attend(layer, expected_TD, plain, self.other)
            assert found.hidden_TD is hidden_TD
            torch.testing.assert_close(hidden_TD, expected_TD, atol=1e-9, rtol=1e-9)
            assert (found.routed is None) == (expected.routed is None)
            if found.routed is not None and expected.routed is not None:
                for name in ("topk_ids_TK", "topk_weights_TK", "x_TD", "router_input"):
                    pair = getattr(found.routed, name), getattr(expected.routed, name)
                    torch.testing.assert_close(*pair, atol=1e-6, rtol=1e-6)
            for one, two in zip(self.kv.entries(layer), self.other.entries(layer), strict=True):
                torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.device, "ACCELERATORS", frozenset({"cpu"}))
    monkeypatch.setattr(paged_attention, "attention_kernels", lambda x: Kernels())
    monkeypatch.setattr(row_ops, "COMPILED_DTYPES", ())  # of a router in float32
    monkeypatch.setattr(linear, "_kind", lambda *_: None)


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_replays_equal_layers_without_a_capture(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, Any]
) -> None:
    """Batches of one size share captures, whatever their rows, contexts and blocks."""
    rig = Rig(tiny_checkpoint(family, **overrides))
    layers = rig.half.spec.num_layers
    for seed, contexts in enumerate([[9, 30, 1], [41, 2, 17], [5, 6, 7, 8], [40, 39, 1, 64]]):
        rig.compare(contexts, seed)
        assert rig.recorder.captures == layers
    rig.compare([12], 9)
    rig.compare([3, 200], 8)  # more blocks
    assert rig.recorder.captures == 3 * layers
    for layer in range(layers):  # the pool moves
        moved = tuple(entry.clone() for entry in rig.kv.entries(layer))
        rig.kv._layers = (*rig.kv._layers[:layer], moved, *rig.kv._layers[layer + 1 :])
    rig.compare([12], 7)
    assert rig.recorder.captures == 4 * layers


@pytest.mark.usefixtures("_as_on_a_device")
def test_other_batches_are_not_accepted(tiny_checkpoint: Checkpoints) -> None:
    rig = Rig(tiny_checkpoint("qwen3_moe"))
    prompt = SequenceSlice([1, 2], 0, [1])
    decode = SequenceSlice([1], 4, [1, 2])
    assert not rig.graphs.accepts(AttentionBatch.build([decode, prompt], block_tokens=4))
    assert not rig.graphs.accepts(AttentionBatch.build([decode] * 257, block_tokens=4))


def test_impossible_graphs_are_refused_by_name(tiny_checkpoint: Checkpoints) -> None:
    rig = Rig(tiny_checkpoint("qwen3_moe"))
    assert DecodeGraphs.of(rig.half, rig.kv, None) is None
    with pytest.raises(ConfigError, match=r"cuda_graphs=true: not with groups.device=cpu"):
        DecodeGraphs.of(rig.half, rig.kv, True)
    with patch.object(AttentionHalf, "joins_later", True), pytest.raises(ConfigError, match="norm"):
        DecodeGraphs.of(rig.half, rig.kv, True)
