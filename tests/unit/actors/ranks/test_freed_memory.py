"""Return of freed memory, in a separate process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

HOLES = """
import time
from pathlib import Path
import torch
from actors.ranks import memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

memory._TRIM_INTERVAL_S = 0.2
memory.bound_memory()
blocks = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each
full = resident_bytes()
del blocks[::4], blocks[::3], blocks[::2]
deadline_s = time.monotonic() + 20
while full - resident_bytes() < 100e6 and time.monotonic() < deadline_s:
    time.sleep(0.05)
print(full - resident_bytes())
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not glibc's")
def test_fragmented_memory_is_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) > 100e6


PRODUCTS = """
import ctypes, random, sys
import torch
from actors.ranks.memory import bound_memory
from kernels.linear import linear

class Held(ctypes.Structure):
    _fields_ = [(f"f{number}", ctypes.c_size_t) for number in range(10)]

def held_bytes():
    libc.mallinfo2.restype = Held
    found = libc.mallinfo2()
    return found.f7 + found.f4  # in use, in the heap and in mappings

libc = ctypes.CDLL(None)
torch.set_num_threads(1)
if sys.argv[1] == "few":
    bound_memory()
linear(torch.zeros(8, 32), torch.zeros(8, 32))
before, sizes = held_bytes(), random.Random(1)
for _ in range(700):
    linear(torch.zeros(sizes.randrange(64, 384), 32), torch.zeros(sizes.randrange(128, 512), 32))
print(held_bytes() - before)
"""
NAMES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def held_bytes(which: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", PRODUCTS, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc is not glibc's")
def test_compiled_products_are_bounded() -> None:
    few, all_of_them = held_bytes("few"), held_bytes("all")
    assert few < all_of_them / 2
    assert few < 160 << 20
