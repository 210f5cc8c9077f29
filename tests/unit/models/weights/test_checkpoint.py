"""Reading checkpoints, and one-line errors with the remedy for invalid ones."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import CheckpointError
from contracts.requests import Sampling
from kernels.steps import run_to_end
from models.decoder.attention import KvPool, kv_bytes_per_token
from models.decoder.decoder import AttentionHalf
from models.experts.expert_half import ExpertHalf
from models.spec import checkpoint_files
from models.spec.checkpoint_files import SafetensorsFile
from models.spec.model import ModelSpec, read_sampling, read_spec
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from models.weights.loading import progress_line
from tests.support.manual_clock import ManualClock
from tests.support.one_line_errors import one_line_error
from tests.support.read_tensors import record_read_names
from tests.support.tiny_models import Checkpoints, set_config


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_old_and_new_spellings_give_same_spec(tiny_checkpoint: Checkpoints, family: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 123.0}
    new = read_spec(tiny_checkpoint(family, rope_parameters=rope))
    old = read_spec(tiny_checkpoint(family, rope_parameters=rope, old_keys=True))
    assert new == old
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=ModelSpec) == new
    assert (new.rope.theta, new.rope.kind, new.rope.factor) == (123.0, "linear", 2.0)


def test_moe_layers_follow_sparse_step_and_dense_list(tiny_checkpoint: Checkpoints) -> None:
    spec = read_spec(
        tiny_checkpoint(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    )
    assert spec.moe_layers == (1, 5)
    assert [spec.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert spec.dense_ffn_size == 56


def test_windows_apply_only_if_enabled_and_eos_ids_are_merged(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    assert read_spec(tiny_checkpoint("mixtral", sliding_window=9)).sliding_windows == (9, 9, 9)
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_spec(folder).sliding_windows == (None, None, None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, -1]}))
    assert read_spec(folder).eos_token_ids == (2, 5)


def test_sampling_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == Sampling(max_tokens=0)
    path = tmp_path / "generation_config.json"
    stated: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    path.write_text(json.dumps({"do_sample": True, "max_new_tokens": 9, "top_h": 1, **stated}))
    assert read_sampling(tmp_path) == Sampling(max_tokens=9, **stated)
    path.write_text(json.dumps({"top_k": None, "top_p": 1, "temperature": 0}))
    assert read_sampling(tmp_path) == Sampling(max_tokens=0, temperature=0)
    bad = {"top_p": 1.5, "temperature": "hot", "top_k": 0.5, "max_new_tokens": 0}
    for name, wrong in bad.items():
        path.write_text(json.dumps({name: wrong}))
        with pytest.raises(CheckpointError, match=f"generation_config.json: .*{name}"):
            read_sampling(tmp_path)


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_auto_dtype_is_stored_dtype_except_float16(
    tiny_checkpoint: Checkpoints, stored: str, requested: str, expected: torch.dtype
) -> None:
    spec = read_spec(tiny_checkpoint(dtype=stored))
    assert resolve_dtype(spec, requested) is expected  # type: ignore[arg-type]


def test_each_half_reads_only_its_own_tensors(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(max_shard_size="40KB")
    read_names = record_read_names(monkeypatch)
    spec, checkpoint = check_checkpoint(folder), Checkpoint(folder)
    assert read_names == [], "the check reads none"
    AttentionHalf.load(checkpoint, spec, dtype=torch.float32)
    assert read_names
    assert not any(".experts." in name for name in read_names)
    read_names.clear()
    ExpertHalf.load(checkpoint, spec, [6, 2], dtype=torch.float32)
    assert len(set(read_names)) == 3 * 2 * 3
    assert all(".experts.6." in name or ".experts.2." in name for name in read_names)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_local_experts_keep_requested_order(
    tiny_checkpoint: Checkpoints, family: str, fused: bool
) -> None:
    folder = tiny_checkpoint(family, fused=fused)
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    for ids in ([7], [-1], [1, 1]):
        with pytest.raises(ValueError, match="expert_ids"):
            ExpertHalf.load(checkpoint, spec, ids, dtype=torch.float32)
    half = ExpertHalf.load(checkpoint, spec, [5, 0], dtype=torch.float32)
    x = torch.randn(1, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    one, row = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for local, expert in enumerate([5, 0]):
        alone = ExpertHalf.load(checkpoint, spec, [expert], dtype=torch.float32)
        counts = [int(local == 0), int(local == 1)]
        expected = run_to_end(alone.steps(1, x, row, one, [1]))
        for given in (counts, torch.tensor(counts)):
            assert torch.equal(run_to_end(half.steps(1, x, row, one, given)), expected)


def test_loaded_weights_are_independent_of_file(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
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
        name: torch.arange(12).view(3, 4).to(getattr(torch, dtype))
        for name, (dtype, _) in checkpoint_files._DTYPES.items()
    }
    save_file({**tensors, "empty": torch.empty(0, 3)}, path)
    file = SafetensorsFile(path)
    for name, expected in load_file(path).items():
        found = file.tensor(name)
        assert found.dtype is expected.dtype
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}), ("deepseek_v3", {})],
)
def test_progress_counts_all_loaded_bytes(
    tiny_checkpoint: Checkpoints, family: str, overrides: dict[str, object]
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


def test_progress_is_one_rewritten_line_on_terminal_and_few_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, clock = io.StringIO(), ManualClock()
    show = progress_line("attention-0", file, clock=clock, every_s=0.1)
    for done in (1, 2, 4):
        show(done * 10**9, 4 * 10**9)
    assert file.getvalue().splitlines() == [
        "attention-0: 1.0 of 4.0 GB loaded (25%)",
        "attention-0: 4.0 of 4.0 GB loaded (100%)",
    ]
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
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
    tiny_checkpoint: Checkpoints, family: str, elements: int, shape: tuple[int, ...]
) -> None:
    spec = read_spec(tiny_checkpoint(family))
    assert kv_bytes_per_token(spec, torch.bfloat16) == 3 * elements * 2
    pool = KvPool(spec, 5, 4, torch.bfloat16)
    assert pool.num_bytes == 20 * kv_bytes_per_token(spec, torch.bfloat16)
    assert {tensor.shape for tensor in pool.entries(0)} == {shape}


INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model")


@pytest.fixture
def sharded(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    folder = tiny_checkpoint("mixtral", max_shard_size="40KB")
    return shutil.copytree(folder, tmp_path / "sharded")


def error_of(folder: Path, *parts: str) -> None:
    """Check that the error is one line with each of `parts`."""
    with one_line_error(CheckpointError, *parts):
        check_checkpoint(folder)


def test_architecture_is_sufficient_without_model_type(single: Path) -> None:
    set_config(single, model_type=None)
    assert check_checkpoint(single).architecture == "qwen3_moe"


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("config.json", None, ["config.json", "missing"]),
        ("config.json", "{", ["config.json", "JSON"]),
        ("config.json", "[1]", ["config.json", "JSON"]),
        ("config.json", "\ufeff", ["config.json", "JSON"]),
        ("model.safetensors", None, ["no weights", "model.safetensors"]),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
        ("model.safetensors", "x" * 5000, ["model.safetensors", "damaged", "download it again"]),
    ],
)
def test_missing_or_damaged_file_is_named(
    single: Path, name: str, text: str | None, parts: list[str]
) -> None:
    error_of(single.parent / "nowhere", "nowhere", "no such folder")
    (single / name).unlink()
    if text is not None:
        (single / name).write_text(text)
    error_of(single, *parts)


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (None, [INDEX, "weight_map"]),
        ("model-00001-of", ["model.norm.weight", "model-00001-of", INDEX]),
        ("../elsewhere.safetensors", ["../elsewhere.safetensors", "plain file name"]),
    ],
)
def test_wrong_index_is_named(sharded: Path, entry: str | None, parts: list[str]) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        (shard for shard in shards if entry and shard.startswith(entry)), entry
    )
    (sharded / INDEX).write_text("{}" if entry is None else json.dumps(index))
    error_of(sharded, *parts)


def test_missing_shard_or_index(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    error_of(sharded, shard.name, "missing", INDEX)
    (sharded / INDEX).unlink()
    error_of(sharded, INDEX, "download")


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_shard(sharded: Path, kept: int) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:kept])
    error_of(sharded, shard.name, "truncated", f"{len(data[:kept])} bytes", "download it again")


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.2.mlp.experts.6.down_proj.weight"]
)
def test_missing_tensor(single: Path, name: str) -> None:
    tensors = load_file(single / "model.safetensors")
    del tensors[name]
    save_file(tensors, single / "model.safetensors")
    error_of(single, name, "missing", "shape")


def test_wrong_tensor_or_format_is_named(single: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for zeros, parts in (
        (torch.zeros(21, 48), ["[21, 48]", "[20, 48]", "config.json"]),
        (torch.zeros(20, 48, dtype=torch.int16), ["I16", "BF16"]),
    ):
        tensors = load_file(single / "model.safetensors") | {name: zeros}
        save_file(tensors, single / "model.safetensors")
        error_of(single, name, *parts)
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    error_of(single, "pytorch_model.bin", "pickled", "safetensors")


def test_wrong_shape_of_fused_experts(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("mixtral", fused=True), tmp_path / "model")
    set_config(folder, num_local_experts=8)
    error_of(folder, "[7, 48]", "[8, 48]")
