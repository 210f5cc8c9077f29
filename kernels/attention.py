"""Causal attention over a ragged batch with keys and values in a paged pool.

A plan is made once per micro-batch and window, and used at every layer. Keys and values are read in
place: on the CPU by a compiled call (kernels/attention_ops.py), on a device by kernels over block
tables, except prompts without earlier context (kernels/paged_attention.py).

Shapes: T new tokens, H query heads, G KV heads, d head dim, P pool slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention_ops import CompiledRows, SequenceRows, compiled_rows, row_steps
from kernels.paged_attention import PackedPart, attend_packed, attend_paged, packed_part
from kernels.pages import PagedPlan, Pages, Seen, plan_paged
from kernels.steps import Steps


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Parts of a batch.

    prefill: chunks of prompts over latents, attended one by one. rows: on the CPU. packed: on a
    device, then the only part. paged: on a device.
    """

    prefill: tuple[SequenceRows, ...] = ()
    rows: CompiledRows | None = None
    packed: PackedPart | None = None
    paged: PagedPlan | None = None


def plan_attention(
    sequences: Sequence[SequenceRows], *, window: int | None, group: int = 0
) -> AttentionPlan:
    """Plan the attention of a batch on the CPU.

    window W: position p sees p-W+1 .. p; None: all positions up to p. group: query heads of a KV
    head, 0 with latents, which have no window.
    """
    if group:
        return AttentionPlan(rows=compiled_rows(sequences, window, group))
    prompts = tuple(seq for seq in sequences if seq.count > 1)
    singles = [seq for seq in sequences if seq.count == 1]
    return AttentionPlan(prompts, compiled_rows(singles, window, 1) if singles else None)


def plan_on_device(
    sequences: Sequence[SequenceRows],
    pages: Pages,
    seen: Seen,
    device: torch.device,
    *,
    group: int,
    packed: bool,
    expands: bool,
) -> AttentionPlan:
    """Plan the attention of a batch on a device.

    group: query heads of a KV head. packed: one call for prompts without earlier context, if the
    batch has nothing else (not with sinks); requires `supports_packed`. expands: such prompts are
    attended one by one, over keys and values of their own rows (with latents, without a window).
    """
    numbered = [(table, seq) for table, seq in enumerate(sequences) if seq.count]
    longest = max(seq.count for _, seq in numbered)
    packed = packed and not any(seq.start for _, seq in numbered)
    if packed and (not seen.chunked or longest <= seen.window):
        return AttentionPlan(packed=packed_part(sequences, seen.window or None, device))
    fresh, others = list[SequenceRows](), list[tuple[int, SequenceRows]]()
    for table, seq in numbered:
        if expands and seq.start == 0 and seq.count > 1:
            fresh.append(seq)
        else:
            others.append((table, seq))
    paged = plan_paged(others, pages, seen, group, device) if others else None
    return AttentionPlan(tuple(fresh), paged=paged)


def attention_steps(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    k_pool_PGd: Tensor,
    v_pool_PGd: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Steps[Tensor]:
    """Return [T, H, dim of a value], by entries of a compiled call or in one step.

    The new k and v must already be in the pool. sinks_H: a score per head that counts in the
    softmax without a value.
    """
    if plan.packed is not None:
        return attend_packed(q_THd, k_TGd, v_TGd, plan.packed, scale)
    (T, H, _), v = q_THd.shape, v_TGd.shape[2]
    out_THv = torch.empty(T, H, v, dtype=q_THd.dtype, device=q_THd.device)
    if plan.paged is not None:
        rows, pools = slice(plan.paged.first, plan.paged.last), (k_pool_PGd, v_pool_PGd)
        for part in plan.paged.parts:
            attend_paged(q_THd[rows], *pools, part, out_THv[rows], scale, sinks_H)
        yield
    if plan.rows is not None:
        yield from row_steps(q_THd, k_pool_PGd, v_pool_PGd, plan.rows, out_THv, scale, sinks_H)
    return out_THv
