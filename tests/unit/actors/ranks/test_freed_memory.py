"""Return of freed memory, in a separate process."""

from __future__ import annotations

import ctypes
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
