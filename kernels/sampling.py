"""Probabilities that tokens are drawn from, by FlashInfer where it is installed.

Shapes: N rows, V vocabulary, K of it.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.fused_ops import import_checked


def top_probs(logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    """Return probabilities of the top_k tokens, of as few as reach top_p; of others 0.

    They are not normalized. FlashInfer keeps all tokens that are as likely as the last of them.
    """
    library = library_on(logits_NV.device.type)
    by = _by_torch if library is None else functools.partial(_by_library, library)
    return by(logits_NV, top_k, top_p_N)


def _by_library(library: Any, logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    V = logits_NV.shape[1]
    probs_NV = logits_NV.softmax(-1).nan_to_num_(1.0 / V)  # the search in a NaN would not end
    kept_NV = library.top_k_renorm_probs(probs_NV, top_k) if top_k < V else probs_NV
    kept_NV = library.top_p_renorm_probs(kept_NV, top_p_N.float().clamp(1e-6))
    return probs_NV.masked_fill_(kept_NV == 0.0, 0.0)  # the bits of its own sums vary


def _by_torch(logits_NV: Tensor, top_k: int, top_p_N: Tensor) -> Tensor:
    logits_NK, ids_NK = logits_NV.topk(top_k)
    probs_NK = logits_NK.softmax(-1)
    dropped_NK = (probs_NK.cumsum(-1) - probs_NK) >= top_p_N.float().unsqueeze(1)
    dropped_NK[:, 0] = False  # top_p may be 0
    return torch.zeros_like(logits_NV).scatter_(1, ids_NK, probs_NK.masked_fill_(dropped_NK, 0.0))


@functools.cache
def library_on(kind: str) -> ModuleType | None:
    """Return FlashInfer's module if it is installed and right on such devices, or None."""
    is_installed = kind == "cuda" and importlib.util.find_spec("flashinfer") is not None
    return import_checked("flashinfer.sampling", _check) if is_installed else None


def _check(library: ModuleType, device: str = "cuda") -> None:
    """Raise AssertionError if a result differs from that of torch's operations."""
    given = torch.randn(3, 4000, device=device), 50, torch.tensor([0.0, 0.5, 1.0], device=device)
    pair = _by_library(library, *given), _by_torch(*given)
    torch.testing.assert_close(*(each_NV / each_NV.sum(1, keepdim=True) for each_NV in pair))
