"""Triton kernels in triton's interpreter on the CPU, and compiled ahead of time for GPUs."""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = Path(__file__).with_name("interpreted_triton.py")


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (200 MB): pip install 'tandem-moe[triton]'",
)


def test_triton_kernels_equal_reference() -> None:
    """Run in a process of its own: triton selects the interpreter at its first import."""
    own = ["-o", "addopts=", "--import-mode=importlib"]  # machines with GPUs may lack plugins
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *own]
    done = subprocess.run(
        [*command, str(INTERPRETED)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


ARCHITECTURES = (80, 90)
MAX_REGISTERS = 128  # of 65,536 for 512 threads: four warps leave room for four blocks
_SLOTS = {"OUTPUTS": 8, "INPUTS": 256}
BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"

# Types of each kernel's arguments in order, and constants, of the largest models that we name.
Kernel = tuple[list[str], dict[str, Any]]
KERNELS: dict[str, Kernel] = {
    "_norm": ([BF16, BF16, BF16, "i32", "fp32"], {"ONCE": False, "BLOCK": 16384}),
    "_rope": ([BF16] * 5 + ["i32"] * 3 + ["fp32"], {"NORM": True, "HEADS": 16, "BLOCK": 64}),
    "_gate": ([BF16, BF16, I32, "i32"], {"COUNTED": True, "BLOCK": 1024}),
    "_sum": ([BF16, I64, F32, F32, I32, "i32"], {"K": 8, "COUNTED": True, "BLOCK": 1024}),
    "_take": ([BF16, I64, BF16, I32, "i32"], {"COUNTED": True, "BLOCK": 1024}),
    "_pack": ([BF16, I64, I32, I32, BF16, I32, I32, "i32", "i32", "i32"],
              {"K": 8, "PAIRS": 16, "EXPERTS": 256, "BLOCK": 1024}),
    "_add": ([F32, I64, BF16, "i32"], {"BLOCK": 1024}),
    "_combine": ([I32, BF16, BF16, F32, F32, "i32"],
                 {"V": 512, "WINDOW": 4096, "CHUNKED": True, "SPLIT": 512, "SINKS": True,
                  "BLOCK": 512}),
    "_slot_gated": ([BF16, I32, BF16, BF16, "i32"], {"D": 7168, "F": 2048, **_SLOTS}),
    "_slot_product": ([BF16, I32, BF16, BF16], {"D": 7168, "F": 2048, **_SLOTS}),
}  # fmt: skip
LARGE = ("_attend", "_grouped")
ATTENTION_REGISTERS = 255  # all of a thread: few, large blocks that read ahead
_ATTEND = [BF16, BF16, BF16, I32, I32, BF16, BF16, F32, F32, "fp32", "i32", "i32"]
# Query heads of a KV head, elements of a key and of a value, rows of a tile.
ATTENTION = {
    "qwen3 decode": (8, 128, 128, 1),
    "qwen3 prompt": (8, 128, 128, 8),
    "heads of 256": (16, 256, 256, 4),
    "gpt-oss prompt": (8, 64, 64, 8),
    "phi prompt": (4, 96, 96, 16),
    "deepseek decode": (128, 576, 512, 1),
    "deepseek prompt": (128, 576, 512, 2),
}


def attention_kernel(heads: int, key: int, value: int, rows: int) -> Kernel:
    from kernels.triton_attention import sizes

    constants = {"BT": 16, "G": 4, "R": heads, "D": key, "V": value, "WINDOW": 4096,
                 "CHUNKED": False, "SPLIT": 512, "SINKS": True, "SHARED": key > value}  # fmt: skip
    return _ATTEND, {**constants, **sizes(heads, key, value, rows, shared=key > value)}


PRODUCT_REGISTERS = 224  # two blocks a processor, whose tensor cores read large tiles
# Outputs and inputs, (token, expert) pairs of 16 experts, storage.
PRODUCTS = {
    "gpt-oss decode": (5760, 2880, 64, "MXFP4"),
    "gpt-oss prompt": (2880, 2880, 8192, "MXFP4"),
    "deepseek decode": (4096, 7168, 64, "FP8"),
    "deepseek prompt": (7168, 2048, 8192, "FP8"),
    "int8 decode": (1536, 2048, 256, "INT8"),
    "int8 prompt": (2048, 768, 8192, "INT8"),
    "moved experts": (1536, 2048, 8192, "PLAIN"),
}


def product_kernel(outputs: int, inputs: int, pairs: int, storage: str) -> Kernel:
    from kernels.stored import Storage
    from kernels.triton_kernels import product_tiles

    codes, scales, step = {"MXFP4": ("*u8", "*u8", 16), "FP8": ("*u8", F32, 16),
                           "INT8": ("*i8", F32, 16), "PLAIN": (BF16, BF16, 8)}[storage]  # fmt: skip
    constants = {"N": outputs, "K": inputs, "KIND": int(Storage[storage]), "BIAS": True,
                 "ALIGNED": step, "EXPERTS": 16, **product_tiles(pairs, 16)}  # fmt: skip
    return [BF16, I32, I64, codes, scales, BF16, BF16, "i32"], constants


def usage(name: str, given_kernel: Kernel, arch: int, to: Path) -> Any:
    """Return registers per thread and bytes of stack, which are spills, of a compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import triton_attention, triton_kernels

    kernel = {**vars(triton_attention), **vars(triton_kernels)}[name]
    types, constants = given_kernel[0], dict(given_kernel[1])
    warps = triton_kernels.norm_warps(constants["BLOCK"]) if name == "_norm" else 4
    options = {"num_warps": constants.pop("num_warps", warps),
               "num_stages": constants.pop("num_stages", 3)}  # fmt: skip
    given = iter(types)
    signature = {
        each: "constexpr" if each in constants else next(given) for each in kernel.arg_names
    }
    assert not list(given), f"{name} has fewer arguments"
    numbered = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    pointers = [n for n, each in enumerate(signature.values()) if each.startswith("*")]
    aligned = {(n,): [["tt.divisibility", 16]] for n in pointers} if name in LARGE else {}
    source = ASTSource(kernel, signature, constexprs=numbered, attrs=aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options=options)
    cubin = to / f"{name}_{arch}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout + shown.stderr)
    assert found is not None, shown.stdout
    return tuple(map(int, found.groups()))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_without_spills(name: str, arch: int, tmp_path: Path) -> None:
    registers, stack_bytes = usage(name, KERNELS[name], arch, tmp_path)
    assert (stack_bytes, registers <= MAX_REGISTERS) == (0, True), registers


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("model", ATTENTION)
def test_attention_compiles_without_spills(model: str, arch: int, tmp_path: Path) -> None:
    registers, stack_bytes = usage("_attend", attention_kernel(*ATTENTION[model]), arch, tmp_path)
    assert (stack_bytes, registers <= ATTENTION_REGISTERS) == (0, True), registers


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("model", PRODUCTS)
def test_products_compile_without_spills(model: str, arch: int, tmp_path: Path) -> None:
    registers, stack_bytes = usage("_grouped", product_kernel(*PRODUCTS[model]), arch, tmp_path)
    assert (stack_bytes, registers <= PRODUCT_REGISTERS) == (0, True), registers


def test_every_kernel_is_listed() -> None:
    from triton.runtime.jit import KernelInterface

    from kernels import triton_attention, triton_kernels

    names = {**vars(triton_kernels), **vars(triton_attention)}
    kernels = {name for name, each in names.items() if isinstance(each, KernelInterface)}
    assert kernels == {*KERNELS, *LARGE, "_lowest", "_unpacked"}
