"""Quantised checkpoints: our logits are those of their dequantised values, to the bit, and within
1e-4 those of `transformers` on them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import CheckpointError
from kernels.linear import has_panels
from kernels.panels import Arithmetic, arithmetic_of, kind_of
from kernels.stored import Storage
from models.experts.expert_half import ExpertHalf
from models.prediction.profile_builder import ProfileBuilder
from models.weights.checkpoint import Checkpoint, check_checkpoint, resolve_dtype
from tests.support.fake_device import act_as_a_device
from tests.support.group_harness import PrefillThreads, ThreadGroup, group_config, prefill_config
from tests.support.local_model import LocalModel, resident_store
from tests.support.one_line_errors import one_line_error
from tests.support.quantised_models import make_fp8, make_int8, make_mxfp4
from tests.support.read_tensors import record_read_names
from tests.support.tiny_models import Checkpoints, prompts
from tests.support.transformers_oracle import Oracle

Pair = tuple[Path, Path]
TOLERANCE = 1e-4

# sizes that are no multiples of a block, and larger than one
LATENT: dict[str, Any] = {
    "hidden_size": 150,
    "moe_intermediate_size": 140,
    "intermediate_size": 129,
    "kv_lora_rank": 131,
    "n_routed_experts": 6,
    "num_hidden_layers": 2,
    "initializer_range": 0.06,
}
GROUPED: dict[str, Any] = {
    "hidden_size": 150,
    "moe_intermediate_size": 140,
    "num_experts": 5,
    "num_hidden_layers": 2,
    "initializer_range": 0.06,
}
EVEN: dict[str, Any] = GROUPED | {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
CLAMPED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}
PROMPT = prompts(3, [50])[0]
DTYPES: tuple[Literal["bfloat16"], Literal["float32"]] = ("bfloat16", "float32")
MADE: dict[str, tuple[str, dict[str, Any], Callable[[Path, Path], Pair], Storage]] = {
    "deepseek_v3": ("deepseek_v3", LATENT, make_fp8, Storage.FP8),
    "qwen3_moe": ("qwen3_moe", GROUPED, make_fp8, Storage.FP8),
    "gpt_oss": ("gpt_oss", CLAMPED, make_mxfp4, Storage.MXFP4),
    "int8": ("deepseek_v3", LATENT, make_int8, Storage.INT8),
    "int8 groups": ("qwen3_moe", EVEN, partial(make_int8, group=128), Storage.INT8),
}
KINDS = list(MADE)


@pytest.fixture(scope="module")
def pair_of(
    tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in made:
            family, overrides, quantise, _ = MADE[kind]
            plain = tiny_checkpoint(family, **overrides)
            made[kind] = quantise(plain, tmp_path_factory.mktemp("quantised"))
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_weights(
    pair_of: Callable[[str], Pair], kind: str
) -> None:
    quantised, dequantised = pair_of(kind)
    family, *_, storage = MADE[kind]
    split = [[3, 0], [1, 4, 2] if family != "deepseek_v3" else [1, 4, 2, 5]]
    for dtype in DTYPES:
        local, floats = (
            LocalModel.load(folder, dtype=dtype, expert_split=split)
            for folder in (quantised, dequantised)
        )
        found, arithmetic = local.forward([PROMPT])[0], arithmetic_of(getattr(torch, dtype))
        assert arithmetic is not None
        if has_panels(getattr(torch, dtype), torch.device("cpu")):
            kept = local.experts[0].layer_experts(1).gate_up
            assert kept.kind == kind_of(arithmetic, storage)
            assert torch.equal(found, floats.forward([PROMPT])[0])
    expected = Oracle(dequantised).logits(PROMPT)
    assert 0.5 < expected.abs().max() < 20
    assert (found - expected).abs().max() < TOLERANCE


def test_mxfp4_logits_equal_those_of_transformers_on_the_same_folder(
    pair_of: Callable[[str], Pair],
) -> None:
    import transformers

    quantised, _ = pair_of("gpt_oss")
    as_floats = transformers.Mxfp4Config(dequantize=True)
    expected = Oracle(quantised, quantization_config=as_floats).logits(PROMPT)
    found = LocalModel.load(quantised, dtype="float32").forward([PROMPT])[0]
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("scale", "code"), [(128.0, 8), (0.001, 127)])
def test_unusual_fp8_is_dequantised_when_it_is_loaded(
    pair_of: Callable[[str], Pair], tmp_path: Path, scale: float, code: int
) -> None:
    folder = _changed(pair_of("qwen3_moe")[0], tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.2.up_proj"
    tensors[f"{name}.weight_scale_inv"].fill_(scale)
    tensors[f"{name}.weight"].view(torch.uint8)[3, 4] = code
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    local = LocalModel.load(folder, dtype="float32")
    assert local.experts[0].layer_experts(1).gate_up.kind == kind_of(Arithmetic.FLOAT32)
    assert local.experts[0].layer_experts(0).gate_up.kind != kind_of(Arithmetic.FLOAT32)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_a_group_serves_quantised_checkpoints(pair_of: Callable[[str], Pair], kind: str) -> None:
    quantised, dequantised = pair_of(kind)
    expected = LocalModel.load(dequantised, dtype="float32").forward([PROMPT])[0][-1]
    with ThreadGroup(quantised, group_config(1, 2)) as group, group.client() as client:
        found = client.last_logits([PROMPT])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rebalance", ["off", "once"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_devices_keep_experts_as_they_are_stored(
    pair_of: Callable[[str], Pair], kind: str, rebalance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, dequantised = pair_of(kind)
    expected = LocalModel.load(dequantised, dtype="float32").forward([PROMPT])[0][-1]
    act_as_a_device(monkeypatch)
    kinds, load = set[Storage](), ExpertHalf.load
    sections = {"experts": {"storage_format": True}, "placement": {"rebalance": rebalance}}

    def recorded(*given: Any, **more: Any) -> ExpertHalf:
        half = load(*given, **more)
        kinds.update(each.gate_up[0].storage for each in half.layers().values())  # type: ignore[attr-defined]
        return half

    monkeypatch.setattr(ExpertHalf, "load", recorded)
    with ThreadGroup(quantised, group_config(1, 2, **sections)) as group, group.client() as client:
        found = client.last_logits([PROMPT])[0]
    assert kinds == {MADE[kind][-1]}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_few_experts_as_they_are_stored_give_the_answers_of_all(
    pair_of: Callable[[str], Pair], tmp_path: Path, kind: str
) -> None:
    """On expert ranks and in a prefill worker, with a profile."""
    folder, _ = pair_of(kind)
    local = LocalModel.load(folder, dtype="float32")
    expected = local.forward([PROMPT])[0][-1]
    profile = tmp_path / "routing.safetensors"
    rows = prompts(7, [60, 60])
    ProfileBuilder(local.attention, resident_store(local.experts[0]), rows).profile().write(
        profile, folder
    )
    sections = {
        "experts": {"slots": 4, "storage_format": True, "profile": str(profile)},
        "prefill": {"experts": "cached", "host_store": str(tmp_path)},
    }
    for served in (
        ThreadGroup(folder, group_config(1, 2, **sections)),
        PrefillThreads(folder, prefill_config(**sections)),
    ):
        with served as group, group.client() as client:
            found = client.last_logits([PROMPT])[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_reads_headers_only_and_ranks_only_their_experts(
    pair_of: Callable[[str], Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = pair_of(kind)
    read_names = record_read_names(monkeypatch)
    spec = check_checkpoint(folder)
    assert read_names == []
    seen: list[tuple[int, int]] = []
    ExpertHalf.load(
        Checkpoint(folder),
        spec,
        [1, 3],
        dtype=torch.bfloat16,
        progress=lambda done, whole: seen.append((done, whole)),
    )
    assert all("experts" in name and "shared" not in name for name in read_names)
    assert kind == "gpt_oss" or all(".1." in name or ".3." in name for name in read_names)
    assert seen[-1][0] == seen[-1][1] > 0


def test_fp8_checkpoints_are_computed_in_the_dtype_that_their_config_states(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = _changed(pair_of("deepseek_v3")[0], tmp_path, config={"dtype": "bfloat16"})
    assert resolve_dtype(check_checkpoint(folder), "auto") is torch.bfloat16
    logits = LocalModel.load(folder).forward([PROMPT])[0]
    exact = LocalModel.load(folder, dtype="float32").forward([PROMPT])[0]
    assert (logits - exact).abs().mean() < 0.05 * exact.abs().mean()


def _changed(
    folder: Path,
    tmp_path: Path,
    *,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """A copy with other fields in config.json and other tensors."""
    tree = json.loads((folder / "config.json").read_text()) | (config or {})
    (tmp_path / "config.json").write_text(json.dumps(tree))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


_DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
_PACKED = "model.layers.1.mlp.experts.down_proj"


def _compressed(group: Any = None, weights: Any = None, **fields: Any) -> dict[str, Any]:
    """A config.json with other fields of compressed-tensors."""
    numbers = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group"}
    group_0 = {"weights": {**numbers, **(weights or {})}, **(group or {})}
    config = {"format": "int-quantized", "config_groups": {"group_0": group_0}}
    return {"quantization_config": {"quant_method": "compressed-tensors", **config, **fields}}


Tensors = dict[str, torch.Tensor | None]
REFUSED: dict[str, list[tuple[dict[str, Any], Tensors, list[str]]]] = {
    "deepseek_v3": [
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            {},
            ["weight_block_size", "[64, 64]", "[128, 128]"],
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {}, ["quant_method", "mxfp4", "fp8"]),
        ({}, {f"{_DOWN}_scale_inv": None}, [f"{_DOWN}_scale_inv", "missing"]),
        ({}, {f"{_DOWN}_scale_inv": torch.ones(1, 2)}, [f"{_DOWN}_scale_inv", "[1, 2]", "[2, 2]"]),
        (
            {},
            {f"{_DOWN}_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
            [f"{_DOWN}_scale_inv", "I32", "BF16"],
        ),
        (
            {},
            {"model.norm.weight": torch.ones(150).to(torch.float8_e4m3fn)},
            ["model.norm.weight", "F8_E4M3", "matrices"],
        ),
    ],
    "int8 groups": [
        *(
            (_compressed(**{field: value}), {}, [f"{field}: {value!r}", *parts])
            for field, value, *parts in (
                ("format", "float-quantized", "quantization_config.format", "pack-quantized"),
                ("kv_cache_scheme", {"num_bits": 8}, "quantization_config."),
                ("transform_config", {"config_groups": {"R1": 1}}, "quantization_config."),
            )
        ),
        (_compressed(config_groups={}), {}, ["quantization_config.config_groups", "missing"]),
        *(
            (_compressed(**{part: {field: value}}), {}, [f"group_0.{name}: {value!r}", *parts])
            for part, field, value, name, *parts in (
                ("group", "input_activations", {"dynamic": True}, "input_activations", "none"),
                ("group", "output_activations", {"dynamic": False}, "output_activations"),
                ("weights", "num_bits", 4, "weights.num_bits", "8"),
                ("weights", "type", "float", "weights.type", "'int'"),
                ("weights", "symmetric", False, "weights.symmetric", "True"),
                ("weights", "strategy", "tensor", "weights.strategy", "'channel', 'group'"),
                ("weights", "actorder", "group", "weights.actorder"),
            )
        ),
        ({}, {f"{_DOWN}_scale": None}, [f"{_DOWN}_scale", "missing"]),
        ({}, {f"{_DOWN}_scale": torch.ones(256, 3)}, [f"{_DOWN}_scale", "[256, 3]", "[256, 1]"]),
        ({}, {f"{_DOWN}_zero_point": torch.zeros(256, 1)}, [f"{_DOWN}_zero_point", "not part of"]),
    ],
    "int8": [
        ({}, {f"{_DOWN}_packed": torch.ones(150, 34).int()}, [_DOWN, "[150, 34]", "[150, 35]"]),
        ({}, {f"{_DOWN}_packed": torch.ones(150, 35)}, [_DOWN, "F32", "I8"]),
        ({}, {f"{_DOWN}": torch.ones(150, 140)}, [f"{_DOWN}_packed", "both stored"]),
    ],
    "gpt_oss": [
        ({"quantization_config": {}}, {}, ["quant_method", "an unknown method"]),
        ({}, {f"{_PACKED}_scales": None}, [f"{_PACKED}_scales", "missing"]),
        ({}, {f"{_PACKED}_scales": torch.ones(5, 64, 3)}, [f"{_PACKED}_scales", "F32", "U8"]),
        ({"intermediate_size": 97}, {}, ["intermediate_size=97", "32"]),
    ],
}


@pytest.mark.parametrize(
    ("kind", "config", "change", "parts"),
    [(kind, *refused) for kind, cases in REFUSED.items() for refused in cases],
)
def test_what_cannot_be_dequantised_is_refused_in_one_line(
    pair_of: Callable[[str], Pair],
    tmp_path: Path,
    kind: str,
    config: dict[str, Any],
    change: Tensors,
    parts: list[str],
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in change.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor

    folder = _changed(pair_of(kind)[0], tmp_path, config=config, change=edit)
    with one_line_error(CheckpointError, *parts):
        check_checkpoint(folder)
