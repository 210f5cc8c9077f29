"""Cache of compiled oneDNN products, in a separate process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

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
