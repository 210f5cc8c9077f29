"""Choice of experts for tokens, grouping of (token, expert) pairs, and SwiGLU feed-forward.

Feed-forward is of one MLP or of a group of experts, also with gpt-oss's clamped gate.

Shapes: T or U tokens, D model dim, F FFN dim, E experts, e local experts, K top-k, N (token,
expert) pairs sorted by expert.
Gate and up are one matrix [2F, D] (gate rows first), so that an expert costs two products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels import row_ops
from kernels.compiled import bits_of
from kernels.layer_ops import EXPERT_FIELDS, add_experts, sum_experts
from kernels.linear import ExpertLinears, PackedLinear, Product, is_packed, rounded_up
from kernels.panels import add_weighted, reads_float32, run_experts, run_mlp
from kernels.steps import Steps, zero_tiled
from kernels.thread_pool import shared_pool

RUN_PAIRS = 512  # pairs of a run of experts
TILE_PAIRS = 128  # of an expert in a run: a part for a thread


@dataclasses.dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float


def swiglu(
    x_TD: Tensor, gate_up: PackedLinear, down: PackedLinear, gate: PackedLinear | None = None
) -> Tensor:
    """Return down @ (silu(gate @ x) * (up @ x)), [T, D] in x's dtype.

    gate: a product with one output per row, whose sigmoid the row's result is multiplied by.
    """
    if gate_up.kind is None:
        y_TD = down(gated(gate_up(x_TD)))
        return y_TD if gate is None else y_TD * gate(x_TD).sigmoid_()
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    weights = gate_up.addresses[0], down.addresses[0], 0 if gate is None else gate.addresses[0]
    rows, out = x_TD.data_ptr(), out_TD.data_ptr()
    run_mlp(shared_pool(), gate_up.kind, rows, *weights, out, len(x_TD), *down.shape)
    return out_TD


def expert_steps(
    x_UD: Tensor, gate_up_e: Sequence[Product], down_e: Sequence[Product], rows_N: Tensor,
    weights_N: Tensor, counts_e: Sequence[int], clamped: ClampedGate | None = None,
) -> Steps[Tensor]:  # fmt: skip
    """Return [U, D] float32: each token's weighted sum over its pairs, zero without pairs.

    A step is a run of experts with at most RUN_PAIRS pairs, possibly part of one expert's.
    gate_up_e: D -> 2F, down_e: F -> D. The first counts_e[0] pairs belong to expert 0, and so on;
    sums are float32 in that order.
    """
    is_compiled = isinstance(gate_up_e, ExpertLinears) and gate_up_e.kind is not None
    if is_compiled and len(rows_N) <= RUN_PAIRS:
        assert isinstance(gate_up_e, ExpertLinears)
        assert isinstance(down_e, ExpertLinears)
        if gate_up_e.kind == down_e.kind:
            return _sum_at_once(x_UD, gate_up_e, down_e, rows_N, weights_N, counts_e, clamped)
    out_UD = yield from zero_tiled(torch.empty_like(x_UD, dtype=torch.float32))
    first = 0
    if is_compiled:
        _check_pairs(rows_N, counts_e, len(x_UD))
    most = (TILE_PAIRS if is_compiled else RUN_PAIRS) if x_UD.device.type == "cpu" else None
    for experts, counts in _runs_of(counts_e, most):
        last = first + sum(counts)
        rows_r, weights_r = rows_N[first:last], weights_N[first:last]
        if is_compiled:
            assert isinstance(gate_up_e, ExpertLinears)
            assert isinstance(down_e, ExpertLinears)
            y_ND = panel_run(x_UD, gate_up_e, down_e, experts, rows_r, counts, clamped)
            _add_weighted(rows_r, weights_r, y_ND, out_UD)
        else:
            spare = rounded_up(counts[-1]) - counts[-1]
            x_ND = x_UD.index_select(0, rows_N[first : last + spare])
            products = [gate_up_e[each] for each in experts], [down_e[each] for each in experts]
            out_UD.index_add_(0, rows_r, weighted_run(x_ND, *products, counts, weights_r, clamped))
        first = last
        yield
    return out_UD


def _sum_at_once(
    x_UD: Tensor, gate_up_e: ExpertLinears, down_e: ExpertLinears, rows_N: Tensor,
    weights_N: Tensor, counts_e: Sequence[int], clamped: ClampedGate | None,
) -> Tensor:  # fmt: skip
    """Return `expert_steps` of few pairs in one compiled call. Raises IndexError."""
    x_UD, rows_N, weights_N = x_UD.contiguous(), rows_N.long().contiguous(), weights_N.contiguous()
    out_UD, counts = torch.empty(x_UD.shape), np.array(counts_e, np.int64)
    args = expert_fields(gate_up_e, down_e, clamped)
    tensors = x_UD, rows_N, weights_N
    args[8:10] = x_UD.shape[0], rows_N.shape[0]
    args[10:13] = [tensor.data_ptr() for tensor in tensors]
    args[13:15] = counts.ctypes.data, out_UD.data_ptr()
    if not sum_experts(shared_pool(), args.ctypes.data):
        _check_pairs(rows_N, counts_e, len(x_UD))
    return out_UD


def _check_pairs(rows_N: Tensor, counts_e: Sequence[int], rows: int) -> None:
    """Raise IndexError for pairs that compiled code would look for outside of the tensors."""
    if len(rows_N) != sum(counts_e) or min(counts_e, default=0) < 0:
        raise IndexError(f"{len(rows_N)} pairs, but counts of {sum(counts_e)}")
    if len(rows_N):
        least, most = (int(each) for each in torch.aminmax(rows_N))
        if least < 0 or most >= rows:
            raise IndexError(f"pairs of rows {least} to {most}, but {rows} rows")


def add_at_once(
    hidden_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, local_of_E: Tensor,
    gate_up_e: ExpertLinears, down_e: ExpertLinears, clamped: ClampedGate | None = None,
) -> bool:  # fmt: skip
    """Add the weighted sums of few rows' experts to hidden, in one compiled call, if possible.

    local_of_E: as of `group_by_expert`.
    """
    is_few = ids_TK.numel() <= RUN_PAIRS and hidden_TD.is_contiguous() and x_TD.is_contiguous()
    is_compiled = gate_up_e.kind is not None and gate_up_e.kind == down_e.kind
    if not is_compiled or not is_few or hidden_TD.dtype is not x_TD.dtype:
        return False
    args = expert_fields(gate_up_e, down_e, clamped)
    args[8:15] = (
        ids_TK.shape[0],
        ids_TK.shape[1],
        x_TD.data_ptr(),
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        local_of_E.data_ptr(),
        hidden_TD.data_ptr(),
    )
    add_experts(shared_pool(), args.ctypes.data)
    return True


def expert_fields(
    gate_up_e: ExpertLinears, down_e: ExpertLinears, clamped: ClampedGate | None
) -> NDArray[np.int64]:
    """Return the arguments of `add_experts`, with those of experts that have panels."""
    assert gate_up_e.kind is not None
    assert down_e.kind == gate_up_e.kind
    alpha, limit = (0.0, 0.0) if clamped is None else (clamped.alpha, clamped.limit)
    args = np.zeros(EXPERT_FIELDS, np.int64)
    args[:8] = (
        gate_up_e.kind,
        down_e.out_features,
        gate_up_e.out_features // 2,
        len(gate_up_e),
        gate_up_e.addresses.ctypes.data,
        down_e.addresses.ctypes.data,
        bits_of(alpha),
        bits_of(limit),
    )
    args[15] = reads_float32(gate_up_e.kind)
    return args


def _add_weighted(rows_N: Tensor, weights_N: Tensor, y_ND: Tensor, out_UD: Tensor) -> None:
    """Add the weighted outputs of pairs to their rows."""
    rows_N, weights_N = rows_N.long().contiguous(), weights_N.contiguous()
    pairs = rows_N.data_ptr(), weights_N.data_ptr(), y_ND.data_ptr()
    add_weighted(shared_pool(), *pairs, out_UD.data_ptr(), *y_ND.shape)


def weighted_run(
    x_ND: Tensor,
    gate_up_r: Sequence[Product],
    down_r: Sequence[Product],
    counts_r: Sequence[int],
    weights_N: Tensor,
    clamped: ClampedGate | None = None,
) -> Tensor:
    """Return [N, D]: the weighted outputs of r experts with counts_r pairs; x_ND may be longer."""
    is_kept = isinstance(gate_up_r[0], PackedLinear)
    if not is_kept and is_packed(x_ND.dtype, x_ND.device):
        return _plain_run(x_ND, gate_up_r, down_r, counts_r, weights_N, clamped)
    gate_up, down = ExpertLinears(gate_up_r, None), ExpertLinears(down_r, None)
    if gate_up.kind is not None:
        rows_N = torch.arange(len(weights_N))
        y_ND = panel_run(x_ND, gate_up, down, range(len(gate_up)), rows_N, counts_r, clamped)
        return y_ND.mul_(weights_N.unsqueeze(1))
    h_NF2 = _per_expert(x_ND, gate_up_r, counts_r)
    h_NF = gated(h_NF2) if clamped is None else clamped_gated(h_NF2, clamped)
    weights_N1 = weights_N.unsqueeze(1)
    y_ND = _per_expert(h_NF, down_r, counts_r)[: len(weights_N)]
    return y_ND.mul_(weights_N1) if y_ND.dtype is torch.float32 else y_ND * weights_N1


def _plain_run(
    x_ND: Tensor,
    gate_up_r: Sequence[Product],
    down_r: Sequence[Product],
    counts_r: Sequence[int],
    weights_N: Tensor,
    clamped: ClampedGate | None,
) -> Tensor:
    """Return `weighted_run` of experts that are packed at each use, one at a time."""
    pieces, first = [], 0
    for gate_up, down, count in zip(gate_up_r, down_r, counts_r, strict=True):
        pairs = slice(first, first + count)
        packed = [gate_up.packed()], [down.packed()]  # type: ignore[attr-defined]
        pieces.append(weighted_run(x_ND[pairs], *packed, [count], weights_N[pairs], clamped))
        first += count
    return torch.cat(pieces)


def panel_run(
    x_UD: Tensor, gate_up_e: ExpertLinears, down_e: ExpertLinears, experts_r: Sequence[int],
    rows_N: Tensor, counts_r: Sequence[int], clamped: ClampedGate | None = None,
) -> Tensor:  # fmt: skip
    """Return [N, D] float32: unweighted outputs of experts with panels for rows of x."""
    assert gate_up_e.kind is not None
    D, F2, kind = x_UD.shape[1], gate_up_e.out_features, gate_up_e.kind
    x_UD, rows_N = x_UD.contiguous(), rows_N.long().contiguous()
    y_ND = torch.empty((len(rows_N), D))
    experts, counts = np.array(experts_r), np.array(counts_r)
    alpha, limit = (0.0, 0.0) if clamped is None else (clamped.alpha, clamped.limit)
    run_experts(
        shared_pool(),
        kind,
        x_UD.data_ptr(),
        rows_N.data_ptr(),
        gate_up_e.addresses.ctypes.data,
        down_e.addresses.ctypes.data,
        experts.ctypes.data,
        counts.ctypes.data,
        len(experts),
        D,
        F2 // 2,
        alpha,
        limit,
        y_ND.data_ptr(),
    )
    return y_ND


def _runs_of(counts_e: Sequence[int], most: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Split experts with pairs into runs of (experts, pair counts).

    A run is large enough for an operation, and its temporaries fit into the cache. most: pairs of
    an expert at a time, so that steps stay short; None: all.
    """
    experts: list[int] = []
    counts: list[int] = []
    for expert, count in enumerate(counts_e):
        while count:
            piece = count if most is None else min(count, most)
            if counts and sum(counts) + piece > RUN_PAIRS:
                yield experts, counts
                experts, counts = [], []
            experts.append(expert)
            counts.append(piece)
            count -= piece
    if counts:
        yield experts, counts


def _per_expert(x_NK: Tensor, linear_r: Sequence[Product], counts_r: Sequence[int]) -> Tensor:
    """Concatenate each expert's product with its rows; the last expert also takes additional rows.

    An expert takes a round number of rows, including some of the next one's, and drops their
    results.
    """
    pieces, first = [], 0
    for product, count in zip(linear_r[:-1], counts_r, strict=False):
        rows = rounded_up(count)
        piece = product(x_NK[first : first + rows])
        pieces.append(piece if rows == count else piece[:count])
        first += count
    last = linear_r[-1](x_NK[first:])
    return torch.cat([*pieces, last]) if pieces else last


def gated(h_NF2: Tensor) -> Tensor:
    """Return silu(gate) * up of [N, 2F], as a fresh [N, F]."""
    gate, up = h_NF2.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def clamped_gated(h_NF2: Tensor, clamped: ClampedGate) -> Tensor:
    """Return [N, F] with the clamped gate."""
    gate, up = h_NF2.chunk(2, dim=-1)
    gate = gate.clamp(max=clamped.limit)
    up = up.clamp(min=-clamped.limit, max=clamped.limit)
    # Row by row: vectorised loops compute the last elements of odd lengths with other bits.
    scaled_NF = torch.empty_like(h_NF2)[:, : gate.shape[1]]
    torch.mul(gate, clamped.alpha, out=scaled_NF)
    return torch.sigmoid(scaled_NF).mul_(gate).mul_(up.add_(1))


# --- choice and grouping


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLimit:
    """Limits the choice to the `kept` of `groups` whose `best` best experts have the top sum."""

    groups: int = 1
    kept: int = 1
    best: int = 1


class RoutingRule:
    """Choice of a token's top_k experts by their scores, the softmax or sigmoids of logits.

    bias_E counts in the choice of groups and experts, not in the weights. normalize: weights of a
    token sum to 1. rounds: weights are rounded to the dtype of the logits (Qwen3-MoE). scale
    multiplies them. jitter: instead of all these, the rule is `sparsemixer_weights`.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        *,
        normalize: bool,
        sigmoid: bool = False,
        rounds: bool = False,
        limit: GroupLimit = GroupLimit(),
        bias_E: Tensor | None = None,
        scale: float = 1.0,
        jitter: float | None = None,
    ) -> None:
        self._top_k, self._normalize, self._sigmoid = top_k, normalize, sigmoid
        self._rounds, self._limit, self._scale = rounds, limit, scale
        self._bias_E = None if bias_E is None else bias_E.float().contiguous()
        bias, groups = (
            0 if self._bias_E is None else self._bias_E.data_ptr(),
            dataclasses.astuple(limit),
        )
        self._jitter = jitter
        score = int(sigmoid) if jitter is None else row_ops.SPARSEMIXER
        flags = experts, score, normalize, rounds
        factor = bits_of(scale if jitter is None else jitter)
        self.fields = np.array((*flags, bias, *groups, factor), np.int64)

    def choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids [T, K] int64, weights [T, K] float32), best expert first."""
        if row_ops.is_compiled(logits_TE):
            ids_TK = torch.empty((len(logits_TE), self._top_k), dtype=torch.int64)
            return ids_TK, self._on_cpu(logits_TE, ids_TK, given=False)
        if self._jitter is not None:
            ids_TK = torch.topk(logits_TE, self._top_k, dim=-1).indices
            return ids_TK, sparsemixer_weights(logits_TE, ids_TK, self._jitter)
        scores_TE, limit = self._scores(logits_TE), self._limit
        choice_TE = scores_TE if self._bias_E is None else scores_TE + self._bias_E
        if limit.kept < limit.groups:
            choice_TGe = choice_TE.view(-1, limit.groups, choice_TE.shape[1] // limit.groups)
            groups_TG = torch.topk(choice_TGe, limit.best, dim=-1).values.sum(-1)
            kept_TG = torch.topk(groups_TG, limit.kept, dim=-1).indices
            dropped_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
            choice_TE = choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), -math.inf).flatten(1)
        weights_TK, ids_TK = torch.topk(choice_TE, self._top_k, dim=-1)
        if choice_TE is not scores_TE:
            weights_TK = scores_TE.gather(1, ids_TK)
        return ids_TK, self._finished(weights_TK, logits_TE.dtype)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return [T, K] float32: the weights of given experts."""
        if row_ops.is_compiled(logits_TE):
            return self._on_cpu(logits_TE, ids_TK.contiguous(), given=True)
        if self._jitter is not None:
            return sparsemixer_weights(logits_TE, ids_TK, self._jitter)
        return self._finished(self._scores(logits_TE).gather(1, ids_TK), logits_TE.dtype)

    def _on_cpu(self, logits_TE: Tensor, ids_TK: Tensor, *, given: bool) -> Tensor:
        """Return the weights; write ids unless `given`."""
        weights_TK, (T, K) = torch.empty(ids_TK.shape), ids_TK.shape
        rule, logits = self.fields.ctypes.data, logits_TE.data_ptr()
        wide, results = logits_TE.dtype is torch.float32, (ids_TK.data_ptr(), weights_TK.data_ptr())
        row_ops.choose_experts(wide, rule, logits, T, K, given, *results)
        return weights_TK

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self._sigmoid:
            return logits_TE.float().sigmoid()
        return logits_TE.softmax(-1, dtype=torch.float32)

    def _finished(self, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if self._normalize:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)  # of a softmax: never zero
            weights_TK /= total_T1 + 1e-20 if self._sigmoid else total_T1
        if self._rounds:
            weights_TK = weights_TK.to(dtype).float()
        return weights_TK if self._scale == 1.0 else weights_TK * self._scale


def sparsemixer_weights(logits_TE: Tensor, ids_TK: Tensor, jitter: float) -> Tensor:
    """Return [T, K] float32: weights of given experts by SparseMixer-v2, Phi-3.5-MoE's rule.

    Experts are taken in their order. An expert's weight is the softmax over those experts not taken
    before whose logit is at most 2 * jitter below the best one's, relative to the larger of that
    and the expert's absolute logit.
    """
    weights, left_TE = [], logits_TE
    for ids_T1 in torch.split(ids_TK, 1, dim=1):
        best_T1 = left_TE.max(dim=-1, keepdim=True).values
        distant_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        probs_TE = left_TE.masked_fill(distant_TE, float("-inf")).softmax(-1, dtype=torch.float32)
        weights.append(probs_TE.gather(1, ids_T1))
        left_TE = left_TE.scatter(1, ids_T1, float("-inf"))
    return torch.cat(weights, dim=1)


def group_by_expert(
    ids_TK: Tensor, weights_TK: Tensor, local_of_E: Tensor, num_local: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Return (rows_N, weights_N, counts_e): local experts' pairs, by expert, then by token.

    local_of_E [E] int64: local index of each expert, num_local if it is not local.
    """
    if ids_TK.device.type == "cpu":
        return _grouped_on_cpu(ids_TK.contiguous(), weights_TK.contiguous(), local_of_E, num_local)
    local_N = local_of_E[ids_TK].flatten()
    local_N, order_N = torch.sort(local_N, stable=True)
    counts = torch.bincount(local_N, minlength=num_local + 1)[:num_local].tolist()
    order_N = order_N[: sum(counts)]
    rows_N = torch.div(order_N, ids_TK.shape[1], rounding_mode="floor")
    return rows_N, weights_TK.flatten()[order_N], counts


def _grouped_on_cpu(
    ids_TK: Tensor, weights_TK: Tensor, local_of_E: Tensor, num_local: int
) -> tuple[Tensor, Tensor, list[int]]:
    rows_N, weights_N = (
        torch.empty(ids_TK.numel(), dtype=torch.int64),
        weights_TK.new_empty((ids_TK.numel(),)),
    )
    counts_e = np.empty(num_local, np.int64)
    row_ops.group_pairs(
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        local_of_E.data_ptr(),
        ids_TK.numel(),
        ids_TK.shape[1],
        num_local,
        rows_N.data_ptr(),
        weights_N.data_ptr(),
        counts_e.ctypes.data,
    )
    counts: list[int] = counts_e.tolist()
    pairs = sum(counts)
    return rows_N[:pairs], weights_N[:pairs], counts


def local_index(expert_ids: list[int], num_experts: int) -> Tensor:
    """Return local_of_E for `group_by_expert`: the position of each expert in `expert_ids`."""
    local_of_E = torch.full((num_experts,), len(expert_ids), dtype=torch.int64)
    local_of_E[torch.tensor(expert_ids, dtype=torch.int64)] = torch.arange(len(expert_ids))
    return local_of_E
