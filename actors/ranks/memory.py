"""Memory of a rank: the size of the KV pool, and what malloc and oneDNN keep."""

from __future__ import annotations

import ctypes
import functools
import os
import threading

import torch

from contracts.config import TandemConfig
from contracts.errors import ResourceError
from contracts.machine import available_bytes
from models.decoder.attention import kv_bytes_per_token
from models.spec.model import ModelSpec

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's limit
_TRIM_INTERVAL_S = 60.0
_COMPILED_PRODUCTS = "256"


def bound_memory() -> None:
    """Set what malloc and oneDNN keep. Call before computing threads start.

    malloc keeps freed memory, because returning a layer's megabytes to the kernel and zeroing them
    again costs more than the arithmetic. Once a minute idle memory is returned (20 ms), so that
    fragmentation and the largest batch do not hold it forever. Without glibc nothing is set.

    oneDNN and torch each cache the latest 1,024 compiled products, 0.4 MB each, and attention over
    contexts of all lengths needs ever new ones: 500 random batches add 1.1 GB. With 256 a process
    stops growing within minutes, but 128 prompts with common prefixes take half as long again.
    Variables that are already set in the environment stay.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, _COMPILED_PRODUCTS)
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)  # other arenas have lower limits
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    _start_trim_thread()


@functools.cache
def _start_trim_thread() -> threading.Thread:
    """Start one thread per process."""
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
    """Return the number of blocks: `kv.pool_tokens`, or what memory allows and batches can use.

    kept_bytes: free memory that is reserved. Raises ResourceError if the pool does not fit.
    """
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
