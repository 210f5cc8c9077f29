"""Triton kernels in triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.skipif(
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
