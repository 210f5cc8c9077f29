"""Reading checkpoints: config spellings, dtypes, tensors of a rank, progress."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.decoder.decoder import AttentionHalf
from models.decoder.kv_pool import KvPool, kv_bytes_per_token
from models.experts.expert_half import ExpertHalf
from models.spec import safetensors_file
from models.spec.model import ModelSpec, read_spec
from models.spec.safetensors_file import SafetensorsFile
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from tests.support.manual_clock import ManualClock

Make = Callable[..., Path]


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that records the names of read tensors."""
    names: list[str] = []
    original = SafetensorsFile.tensor

    def spy(self: SafetensorsFile, name: str) -> torch.Tensor:
        names.append(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsFile, "tensor", spy)
    return names


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_old_and_new_spellings_give_same_spec(tiny_checkpoint: Make, family: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 123.0}
    new = read_spec(tiny_checkpoint(family, rope_parameters=rope))
    old = read_spec(tiny_checkpoint(family, rope_parameters=rope, old_keys=True))
    assert new == old
    assert (new.rope.theta, new.rope.kind, new.rope.factor) == (123.0, "linear", 2.0)


def test_spec_roundtrips_through_msgpack(tiny_checkpoint: Make) -> None:
    spec = read_spec(tiny_checkpoint("mixtral", sliding_window=9))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


def test_moe_layers_follow_sparse_step_and_dense_list(tiny_checkpoint: Make) -> None:
    spec = read_spec(
        tiny_checkpoint(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    )
    assert spec.moe_layers == (1, 5)
    assert [spec.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert spec.dense_ffn_size == 56


def test_windows_apply_only_if_enabled(tiny_checkpoint: Make, tmp_path: Path) -> None:
    assert read_spec(tiny_checkpoint("mixtral", sliding_window=9)).sliding_windows == (9, 9, 9)
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_spec(folder).sliding_windows == (None, None, None)


def test_eos_ids_are_merged_from_both_files(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_spec(folder).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_auto_dtype_is_stored_dtype_except_float16(
    tiny_checkpoint: Make, stored: str, requested: str, expected: torch.dtype
) -> None:
    spec = read_spec(tiny_checkpoint(dtype=stored))
    assert resolve_dtype(spec, requested) is expected  # type: ignore[arg-type]


def test_check_reads_no_tensor_data(tiny_checkpoint: Make, read_names: list[str]) -> None:
    check_checkpoint(tiny_checkpoint("mixtral", max_shard_size="40KB"))
    assert read_names == []


def test_each_half_reads_only_its_own_tensors(tiny_checkpoint: Make, read_names: list[str]) -> None:
    folder = tiny_checkpoint(max_shard_size="40KB")
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    AttentionHalf.load(checkpoint, spec, dtype=torch.float32)
    assert read_names
    assert not any(".experts." in name for name in read_names)
    read_names.clear()
    ExpertHalf.load(checkpoint, spec, [6, 2], dtype=torch.float32)
    assert len(read_names) == 3 * 2 * 3
    assert all(".experts.6." in name or ".experts.2." in name for name in read_names)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_local_experts_keep_requested_order(
    tiny_checkpoint: Make, family: str, fused: bool
) -> None:
    folder = tiny_checkpoint(family, fused=fused)
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    half = ExpertHalf.load(checkpoint, spec, [5, 0], dtype=torch.float32)
    x = torch.randn(1, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    one, row = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for local, expert in enumerate([5, 0]):
        alone = ExpertHalf.load(checkpoint, spec, [expert], dtype=torch.float32)
        counts = [int(local == 0), int(local == 1)]
        expected = alone.run(1, x, row, one, [1])
        assert torch.equal(half.run(1, x, row, one, counts), expected)
        assert torch.equal(half.run(1, x, row, one, torch.tensor(counts)), expected)


def test_expert_ids_must_exist_and_be_distinct(tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint()
    for ids in ([7], [-1], [1, 1]):
        with pytest.raises(ValueError, match="expert_ids"):
            ExpertHalf.load(Checkpoint(folder), read_spec(folder), ids, dtype=torch.float32)


def test_loaded_weights_are_independent_of_file(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    spec = read_spec(folder)
    half = AttentionHalf.load(Checkpoint(folder), spec, dtype=torch.float32)
    x = torch.ones(1, spec.hidden_size)
    before = half.logits(x)
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(half.logits(x), before)


def test_misaligned_tensor_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((-len(header)) % 8 + 3)
    values = torch.tensor([[1.5], [-2.0]])
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert torch.equal(SafetensorsFile(path).tensor("x"), values)


def test_dtypes_are_read_as_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {
        name: torch.arange(12).view(3, 4).to(dtype)
        for name, dtype in safetensors_file._DTYPES.items()
    }
    save_file({**tensors, "empty": torch.empty(0, 3)}, path)
    file = SafetensorsFile(path)
    for name, expected in load_file(path).items():
        found = file.tensor(name)
        assert found.dtype is expected.dtype
        assert torch.equal(found.float(), expected.float())


def test_released_pages_are_read_again(tiny_checkpoint: Make) -> None:
    checkpoint = Checkpoint(tiny_checkpoint())
    tensor = checkpoint.get("model.norm.weight")
    before = tensor.clone()
    checkpoint.release()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}), ("deepseek_v3", {})],
)
def test_progress_counts_all_loaded_bytes(
    tiny_checkpoint: Make, family: str, overrides: dict[str, object]
) -> None:
    folder = tiny_checkpoint(family, **overrides)
    spec, seen = read_spec(folder), list[tuple[int, int]]()

    def show(done: int, whole: int) -> None:
        seen.append((done, whole))

    AttentionHalf.load(Checkpoint(folder), spec, dtype=torch.bfloat16, progress=show)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    seen.clear()
    ExpertHalf.load(Checkpoint(folder), spec, [1, 3], dtype=torch.bfloat16, progress=show)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_progress_line_is_rewritten_at_intervals() -> None:
    stream, clock = io.StringIO(), ManualClock()
    show = progress_line("attention-0", stream, clock=clock, every_s=0.5)
    for done in (1, 2, 3, 4):
        show(done * 10**9, 4 * 10**9)
        clock.advance(0.3)
    lines = stream.getvalue().split("\r")[1:]
    assert lines == [
        "attention-0: 1.0 of 4.0 GB loaded (25%)",
        "attention-0: 3.0 of 4.0 GB loaded (75%)",
        "attention-0: 4.0 of 4.0 GB loaded (100%)\n",
    ]


@pytest.mark.parametrize(
    ("family", "elements", "shape"),
    [("qwen3_moe", 2 * 2 * 12, (20, 2, 12)), ("deepseek_v3", 18 + 6, (20, 1, 24))],
)
def test_pool_size_matches_reported_bytes(
    tiny_checkpoint: Make, family: str, elements: int, shape: tuple[int, ...]
) -> None:
    spec = read_spec(tiny_checkpoint(family))
    assert kv_bytes_per_token(spec, torch.bfloat16) == 3 * elements * 2
    pool = KvPool(spec, 5, 4, torch.bfloat16)
    assert pool.num_bytes == 20 * kv_bytes_per_token(spec, torch.bfloat16)
    assert {tensor.shape for tensor in pool.entries(0)} == {shape}
