"""How many KV blocks an attention rank can afford, what becomes of freed memory, and how much
oneDNN may keep."""

from __future__ import annotations

import ctypes
import functools
import os
import threading

import torch

from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.machine import available_bytes
from models.decoder.kv_pool import kv_bytes_per_token
from models.spec.model import ModelSpec

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # more is refused
_TRIM_INTERVAL_S = 60.0
_COMPILED_PRODUCTS = "256"  # in the environment


def bound_memory() -> None:
    """Has malloc and oneDNN keep what helps, and no more. Call it before the threads that compute
    are started, and before the first product.

    malloc keeps what is freed: a layer's temporaries are megabytes, and given back to the kernel
    and zeroed anew at every use they cost more than the arithmetic. Once a minute what lies idle is
    given back all the same, 20 ms of work: else holes between what lives longer, and what the
    largest batch ever took, would stay for good. Where malloc is not glibc's it is left as it is.

    oneDNN compiles a product for each combination of sizes, of which attention over contexts of all
    lengths has no end, and torch and oneDNN each keep the latest 1,024, at 0.4 MB apiece: 500
    batches of random lengths made a process grow by 1.1 GB. With 256 a process that computes for
    hours stops growing in its first minutes; with 128 prompts that share their beginnings take half
    as long again, for the sizes of their attention alone are more. What the environment says
    already stays.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, _COMPILED_PRODUCTS)
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)  # arenas of threads have other, lower limits
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    _start_trim_thread()


@functools.cache
def _start_trim_thread() -> threading.Thread:
    """One thread, however many workers a process has."""
    trim, never = ctypes.CDLL(None).malloc_trim, threading.Event()
    trim.argtypes = [ctypes.c_size_t]

    def work() -> None:
        while not never.wait(_TRIM_INTERVAL_S):
            trim(0)

    thread = threading.Thread(target=work, name="malloc-trim", daemon=True)
    thread.start()
    return thread


def kv_pool_blocks(
    model: ModelSpec,
    dtype: torch.dtype,
    config: TandemConfig,
    device: torch.device,
    *,
    ranks_on_node: int,
    kept_bytes: int = 0,
) -> int:
    """Blocks of the pool: what `kv.pool_tokens` says, else what the memory allows, but no more than
    the largest batch could use. kept_bytes: of what is free, spoken for. Raises ResourceError if
    that (or one block) does not fit."""
    block_tokens = config.kv.block_tokens
    block_bytes = kv_bytes_per_token(model, dtype) * block_tokens
    free_bytes = max(0, _free_bytes(device) - kept_bytes)
    if config.kv.pool_tokens is not None:
        blocks = max(1, -(-config.kv.pool_tokens // block_tokens))
        if blocks * block_bytes > free_bytes:
            raise ResourceError(
                f"kv.pool_tokens={config.kv.pool_tokens} needs {blocks * block_bytes} bytes, "
                f"{free_bytes} are free; lower it"
            )
        return blocks
    usable_bytes = int(free_bytes * config.kv.memory_fraction / max(1, ranks_on_node))
    useful = -(-model.max_context_tokens // block_tokens) * config.schedule.max_batch_sequences
    blocks = min(usable_bytes // block_bytes, useful)
    if blocks < 1:
        raise ResourceError(
            f"kv.memory_fraction={config.kv.memory_fraction} leaves {usable_bytes} bytes for the "
            f"KV pool, one block needs {block_bytes}; raise it or use fewer ranks"
        )
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
