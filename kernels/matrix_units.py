"""Choice between oneDNN's products and panels where a processor has matrix units.

Measured once for each processor and version of the code: the first process that needs it keeps the
answer beside the compiled code, and all others of the machine read it, so that ranks agree on bits.
oneDNN must be faster for every number of rows, and give a row the same bits in any batch.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROWS = (1, 2, 3, 4, 7, 8, 16, 33, 64)
SHAPE = (1024, 1024)  # of the weight that is measured
_REPEATS = 15

Product = Callable[[Tensor], Tensor]


def decided(folder: Path | None, dtype: torch.dtype) -> bool | None:
    """Return the answer kept in a folder: whether oneDNN multiplies; None: not measured."""
    with contextlib.suppress(OSError):
        if folder is not None:
            return _file(folder, dtype).read_text(encoding="utf-8") == "onednn"
    return None


def decide(folder: Path | None, dtype: torch.dtype, is_better: Callable[[], bool]) -> bool:
    """Return the answer kept in a folder, or measure and keep it. Without a folder: False."""
    found = decided(folder, dtype)
    if folder is None or found is not None:
        return bool(found)
    answer = "onednn" if is_better() else "panels"
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8") as written:
            written.write(answer)
            written.flush()
            with contextlib.suppress(FileExistsError):  # another process was first: its answer
                os.link(written.name, _file(folder, dtype))
    except OSError:
        return False
    return bool(decided(folder, dtype))


def is_better(onednn: Product, panels: Product, x_TK: Tensor) -> bool:
    """Return whether oneDNN's product is faster for every number of rows, with a row's own bits."""
    return _keeps_bits(onednn, x_TK) and all(
        first < second
        for first, second in zip(times_s(onednn, x_TK), times_s(panels, x_TK), strict=True)
    )


def times_s(product: Product, x_TK: Tensor) -> Sequence[float]:
    """Return the shortest time of a product by number of rows."""
    found = []
    for rows in ROWS:
        x, spent_s = x_TK[:rows], []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            product(x)
            spent_s.append(time.perf_counter() - start_s)
        found.append(min(spent_s))
    return found


def _keeps_bits(product: Product, x_TK: Tensor) -> bool:
    whole = product(x_TK)
    return all(torch.equal(product(x_TK[:rows]), whole[:rows]) for rows in ROWS)


def _file(folder: Path, dtype: torch.dtype) -> Path:
    return folder / f"products-{str(dtype)[6:]}"
