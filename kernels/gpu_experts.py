"""A layer's experts on a GPU, all or those of a rank, without waits of the host.

All (token, expert) pairs are computed in two grouped products:

    pairs by token       t0: 3 1    t1: 1 0                      place of each pair
    sorted by expert     0: t1 | 1: t0 t1 | 3: t0                3  1 | 2  0
    ends of the experts  1       3     3    4

A token's sum runs over its experts in the order given, without atomic additions, so that every run
gives equal bits. Pairs of experts that are elsewhere are sorted to the end, where nothing reads.

Shapes: T tokens, D model dim, F FFN dim, e experts, K top-k, N = T * K pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kernels import fused_ops
from kernels.device import runs_on_device
from kernels.experts import ClampedGate, clamped_gated, gated
from kernels.linear import ExpertLinears, Product
from kernels.stored import Storage
from kernels.stored_experts import ExpertTable

PIECE_TOKENS = 32_768  # enough for the full rate; bounds the pairs' memory
_ALIGNED_BYTES = 16  # of the grouped product's rows
_GROUPED_MAJOR = (9, 10)  # on other architectures torch's grouped product waits for the counts
_GroupedProduct = Callable[[Tensor, ExpertLinears, Tensor], Tensor]


def runs_on_gpu(x_TD: Tensor, linear_e: Sequence[Product], local_of_E: Tensor) -> bool:
    """Return whether `gpu_experts` applies to all pairs: on a GPU that holds all experts."""
    return runs_on_device(x_TD.device) and len(linear_e) == local_of_E.shape[0]


def gpu_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_e: ExpertLinears,
    down_e: ExpertLinears,
    clamped: ClampedGate | None = None,
    counts_e: Tensor | None = None,
) -> Tensor:
    """Return [T, D] float32: each token's weighted sum over its experts ids_TK in [0, e).

    gate_up_e: D -> 2F, down_e: F -> D. counts_e: pairs of each expert; ids may then be e, of an
    expert elsewhere. Where neither torch nor triton has a grouped product for them (dtypes other
    than bfloat16), each expert is a product of its own, and the host waits for the counts.
    """
    products = _products(x_TD, gate_up_e, down_e)
    out_TD = torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for first in range(0, x_TD.shape[0], PIECE_TOKENS):
        rows = slice(first, first + PIECE_TOKENS)
        is_whole = x_TD.shape[0] <= PIECE_TOKENS
        pairs = Pairs(ids_TK[rows], len(gate_up_e), counts_e if is_whole else None)
        count = None if counts_e is None else pairs.ends_e[-1:]
        x_ND = fused_ops.gather_rows(x_TD[rows], pairs.rows_N, count)
        h_NF2 = products(x_ND, gate_up_e, pairs.ends_e)
        h_NF = fused_ops.gated(h_NF2, count) if clamped is None else clamped_gated(h_NF2, clamped)
        y_ND = products(h_NF, down_e, pairs.ends_e)
        fused_ops.weighted_sum(y_ND, pairs.places_TK, weights_TK[rows], out_TD[rows], count)
    return out_TD


class Pairs:
    """Pairs by expert, then token: rows_N (tokens), ends_e int32 (pairs of 0 .. e), places_TK."""

    def __init__(self, ids_TK: Tensor, num_experts: int, counts_e: Tensor | None = None) -> None:
        T, K = ids_TK.shape
        device = ids_TK.device
        short_N = ids_TK.to(torch.int16).flatten()  # four times faster to sort
        sorted_N, order_N = torch.sort(short_N, stable=True)
        if counts_e is None:
            nexts_e = torch.arange(1, num_experts + 1, dtype=torch.int16, device=device)
            self.ends_e = torch.searchsorted(sorted_N, nexts_e, out_int32=True)
        else:
            self.ends_e = counts_e.cumsum(0, dtype=torch.int32)
        self.rows_N = torch.div(order_N, K, rounding_mode="floor")
        places_N = torch.arange(T * K, device=device)
        self.places_TK = torch.empty_like(order_N).scatter_(0, order_N, places_N).view(T, K)


def grouped_products(x_NK: Tensor, linear_e: ExpertLinears, ends_e: Tensor) -> Tensor:
    """Compute each expert's product with its rows in one kernel."""
    assert linear_e.weight_eNK is not None
    out_NN = functional.grouped_mm(x_NK, linear_e.weight_eNK.transpose(1, 2), offs=ends_e)
    if linear_e.bias_eN is not None:
        pairs_N = torch.arange(x_NK.shape[0], dtype=torch.int32, device=x_NK.device)
        expert_N = torch.searchsorted(ends_e[:-1], pairs_N, right=True)
        out_NN += linear_e.bias_eN.index_select(0, expert_N)
    return out_NN


def single_products(x_NK: Tensor, linear_e: ExpertLinears, ends_e: Tensor) -> Tensor:
    """Compute each expert's product with its rows one by one, then zeros. Waits for ends_e."""
    pieces, first = [], 0
    for product, last in zip(linear_e, ends_e.tolist(), strict=True):
        if last > first:
            pieces.append(product(x_NK[first:last]))
        first = last
    if first < len(x_NK) or not pieces:
        pieces.append(x_NK.new_zeros((len(x_NK) - first, linear_e.out_features)))
    return torch.cat(pieces)


def _products(x_TD: Tensor, gate_up_e: ExpertLinears, down_e: ExpertLinears) -> _GroupedProduct:
    """Return how the products of all experts are computed: (x_NK, linear_e, ends_e) -> [N, N]."""
    if _groups(x_TD, gate_up_e) and _groups(x_TD, down_e):
        return grouped_products
    own = fused_ops.fused_kernels(x_TD)
    tables = [] if own is None else [each.table for each in (gate_up_e, down_e)]
    if own is not None and all(table is not None and _fits(x_TD, table) for table in tables):
        grouped: _GroupedProduct = own.grouped_products
        return grouped
    return single_products


def _fits(x_TD: Tensor, table: ExpertTable) -> bool:
    codes = table.first.codes
    return table.first.storage is not Storage.PLAIN or codes.dtype is x_TD.dtype


def _groups(x_TD: Tensor, linear_e: ExpertLinears) -> bool:
    weight_eNK = linear_e.weight_eNK
    if weight_eNK is None or x_TD.dtype is not torch.bfloat16 or x_TD.device.type == "cpu":
        return False
    sizes = (size * weight_eNK.dtype.itemsize for size in weight_eNK.shape[1:])
    aligned = all(size % _ALIGNED_BYTES == 0 for size in sizes)
    return aligned and _has_grouped_product(x_TD.device)


@functools.cache
def _has_grouped_product(device: torch.device) -> bool:
    if not hasattr(functional, "grouped_mm"):  # from torch 2.10 on
        return False
    if device.type == "meta":
        return True
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MAJOR


FEW_PAIRS: Final = 64  # above, tokens share experts, and sorting pays


def supports_slots(
    x_TD: Tensor, ids_TK: Tensor, gate_up_S: ExpertLinears, clamped: ClampedGate | None
) -> bool:
    """Return whether `slot_experts` applies to this number of pairs (GPU: with triton only)."""
    is_plain = gate_up_S.weight_eNK is not None and gate_up_S.bias_eN is None
    if ids_TK.numel() > FEW_PAIRS or clamped is not None or not is_plain:
        return False
    return not x_TD.is_cuda or fused_ops.fused_kernels(x_TD) is not None


def slot_experts(
    x_TD: Tensor, slots_TK: Tensor, gate_up_S: ExpertLinears, down_S: ExpertLinears, y_ND: Tensor
) -> None:
    """Fill the rows of y with a slot (int32) >= 0: the expert's unweighted output for the pair."""
    own = fused_ops.fused_kernels(x_TD)
    if own is not None:
        own.slot_experts(x_TD.contiguous(), slots_TK, gate_up_S.weight_eNK, down_S.weight_eNK, y_ND)
        return
    slots_N, K = slots_TK.flatten(), slots_TK.shape[1]
    for slot in sorted(set(slots_N.tolist())):
        if slot >= 0:
            at_n = (slots_N == slot).nonzero().flatten()
            h_nF2 = gate_up_S[slot](x_TD.index_select(0, at_n // K))
            y_ND[at_n] = down_S[slot](gated(h_nF2))
