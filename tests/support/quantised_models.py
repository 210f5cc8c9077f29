"""Quantised forms of tiny checkpoints, each beside a float32 folder with the values it stands for
(made without our fast kernels)."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.kernel_reference import dequantize_mxfp4_reference

Tensors = dict[str, torch.Tensor]
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def make_fp8(plain: Path, folder: Path) -> tuple[Path, Path]:
    """(quantised, dequantised) copies of `plain`: all projections in 128x128 blocks of fp8."""

    def quantise(name: str, weight: torch.Tensor, packed: Tensors, floats: Tensors) -> None:
        if not name.endswith("proj.weight") and "kv_a_proj" not in name:
            packed[name] = floats[name] = weight
            return
        rows, columns = (-(-size // 128) for size in weight.shape)
        scales = torch.empty(rows, columns)
        stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        floats[name] = torch.empty(weight.shape)
        for i in range(rows):
            for j in range(columns):
                square = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
                scales[i, j] = weight[square].abs().max() / 448
                stored[square] = (weight[square] / scales[i, j]).to(torch.float8_e4m3fn)
                floats[name][square] = stored[square].float() * scales[i, j]
        packed[name], packed[f"{name}_scale_inv"] = stored, scales

    return _pair(plain, folder, quantise, FP8)


def make_int8(plain: Path, folder: Path, *, group: int | None = None) -> tuple[Path, Path]:
    """(quantised, dequantised) copies of `plain` as compressed-tensors: all projections in int8.

    Packed, by output; or with a group of inputs not packed, with scales in bfloat16."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}

    def quantise(name: str, weight: torch.Tensor, packed: Tensors, floats: Tensors) -> None:
        if not name.endswith("proj.weight"):
            packed[name] = floats[name] = weight
            return
        N, K = weight.shape
        groups = weight.view(N, -1, group or K)
        scales = groups.abs().amax(-1, keepdim=True) / 127
        scales = scales.bfloat16() if group else scales
        codes = (groups / scales).round().clamp(-128, 127)
        floats[name], codes = (codes * scales.float()).view(N, K), codes.view(N, K)
        packed[f"{name}_scale"] = scales.squeeze(-1)
        if group:
            packed[name] = codes.to(torch.int8)
            return
        places = torch.nn.functional.pad(codes + 128, (0, -K % 4)).long().view(N, -1, 4)
        words = sum(places[..., place] << 8 * place for place in range(4))
        packed[f"{name}_packed"] = words.to(torch.int32)  # type: ignore[union-attr]
        packed[f"{name}_shape"] = torch.tensor([N, K])

    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if group else "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }
    return _pair(plain, folder, quantise, config)


def make_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """(quantised, dequantised) copies of a gpt-oss checkpoint: random MXFP4 experts."""
    generator = torch.Generator().manual_seed(0)

    def quantise(name: str, weight: torch.Tensor, packed: Tensors, floats: Tensors) -> None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = floats[name] = weight
            return
        E, columns, rows = weight.shape  # stored transposed
        shape = (E, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        values = [
            dequantize_mxfp4_reference(block.tolist(), int(exponent))
            for block, exponent in zip(blocks.view(-1, 16), exponents.flatten(), strict=True)
        ]
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, exponents
        whole = torch.tensor(values).view(E, rows, columns)
        floats[name] = whole.transpose(1, 2).contiguous()

    return _pair(plain, folder, quantise, MXFP4)


def _pair(
    plain: Path,
    folder: Path,
    quantise: Callable[[str, torch.Tensor, Tensors, Tensors], None],
    config: Mapping[str, object],
) -> tuple[Path, Path]:
    packed: Tensors = {}
    floats: Tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        quantise(name, weight, packed, floats)
    quantised = shutil.copytree(plain, folder / "quantised")
    dequantised = shutil.copytree(plain, folder / "dequantised")
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, dequantised / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**tree, "quantization_config": config}))
    return quantised, dequantised
