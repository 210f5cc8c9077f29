"""Slow, plain counterparts of the kernels, for tests: loops over tokens, written from the formula.

Shapes: T tokens, H query heads, G KV heads, d head dim, S context, U tokens, e local experts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention import attention_steps
from kernels.attention_ops import SequenceRows
from kernels.experts import ClampedGate, expert_steps
from kernels.latent_attention import latent_attention_steps
from kernels.pages import Pages
from kernels.steps import run_to_end


class Layout(NamedTuple):
    """Sequences in a pool. slots: of each one's context."""

    sequences: list[SequenceRows]
    slots: list[Tensor]
    pages: Pages
    pool_slots: int

    @property
    def new_slots(self) -> Tensor:
        return torch.cat(
            [s[seq.start :] for s, seq in zip(self.slots, self.sequences, strict=True)]
        )


def layout(shapes: list[tuple[int, int]], block_tokens: int = 4) -> Layout:
    """Lay out sequences of (new, cached) tokens in shuffled blocks, a single one in one run."""
    numbers = [-(-sum(shape) // block_tokens) for shape in shapes]
    order = torch.randperm(sum(numbers), generator=torch.Generator().manual_seed(5)) + 1
    order = order.sort().values if len(shapes) == 1 else order
    tables = torch.zeros(len(shapes), max(numbers), dtype=torch.int32)
    sequences, slots, first = list[SequenceRows](), list[Tensor](), 0
    for row, (blocks, (count, start)) in enumerate(
        zip(torch.split(order, numbers), shapes, strict=True)
    ):
        tables[row, : len(blocks)] = blocks
        own = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()
        slots.append(own[: count + start])
        run = slice(int(own[0]), int(own[0]) + count + start)
        sequences.append(SequenceRows(first, count, start, run if len(shapes) == 1 else slots[-1]))
        first += count
    pool_slots = (sum(numbers) + 1) * block_tokens
    return Layout(sequences, slots, Pages(tables, block_tokens), pool_slots)


def ragged_attention(*args: Any, **kwargs: Any) -> Tensor:
    return run_to_end(attention_steps(*args, **kwargs))


def ragged_latent_attention(*args: Any, **kwargs: Any) -> Tensor:
    return run_to_end(latent_attention_steps(*args, **kwargs))


def grouped_experts(*args: Any, **kwargs: Any) -> Tensor:
    return run_to_end(expert_steps(*args, **kwargs))


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """w_i * x_i / sqrt(mean_j x_j^2 + eps), in float64."""
    x_f64 = x.double()
    mean = (x_f64 * x_f64).sum(-1, keepdim=True) / x.shape[-1]
    return weight_D.double() * x_f64 / torch.sqrt(mean + eps)


def rope_reference(x_THd: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """Each pair (x_i, x_{i+d/2}) as a complex number times exp(i * position * frequency)."""
    half = x_THd.shape[-1] // 2
    pairs = torch.complex(x_THd[..., :half].double(), x_THd[..., half:].double())
    angles = positions_T.double()[:, None, None] * inv_freq.double()
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def attention_reference(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[T, H, d of v] float64 of one sequence: row t is at position start + t, and sees the keys
    at positions <= its own and > its own - window. Sinks: scores without a value."""
    T, H, _ = q_THd.shape
    k_SHd, v_SHd = (
        each.double().repeat_interleave(H // each.shape[1], 1) for each in (k_SGd, v_SGd)
    )
    out_THd = torch.empty(T, H, v_SGd.shape[2], dtype=torch.float64)
    for t in range(T):
        last = start + t + 1
        first = 0 if window is None else max(0, last - window)
        scores_HS = torch.einsum("hd,shd->hs", q_THd[t].double(), k_SHd[first:last]) * scale
        if sinks_H is not None:
            scores_HS = torch.cat((scores_HS, sinks_H[:, None].double()), 1)
        probs_HS = torch.softmax(scores_HS, dim=1)[:, : last - first]
        out_THd[t] = torch.einsum("hs,shd->hd", probs_HS, v_SHd[first:last])
    return out_THd


def experts_reference(
    x_UD: Tensor,
    gate_up_e: Tensor,
    down_e: Tensor,
    pairs: Sequence[tuple[int, int, float]],
    clamped: ClampedGate | None = None,
    biases_e: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[U, D] float64 for (row, local expert, weight) pairs in any order.

    clamped: the gate is (up + 1) * gate * sigmoid(alpha * gate)."""
    out_UD = torch.zeros(x_UD.shape, dtype=torch.float64)
    for row, expert, weight in pairs:
        gate_up_bias, down_bias = (0.0, 0.0) if biases_e is None else (b[expert] for b in biases_e)
        both, alpha = gate_up_e[expert].double() @ x_UD[row].double() + gate_up_bias, 1.0
        gate, up = both.chunk(2)
        if clamped is not None:
            limit, alpha = clamped.limit, clamped.alpha
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit) + 1
        inner = up * gate / (1 + torch.exp(-alpha * gate))
        out_UD[row] += weight * (down_e[expert].double() @ inner + down_bias)
    return out_UD


def limited_top_k_reference(
    scores_E: Sequence[float],
    top_k: int,
    *,
    groups: int,
    kept: int,
    best: int,
    bias_E: Sequence[float],
    normalize: bool,
) -> dict[int, float]:
    """{expert: weight} of one token: the best experts, by score + bias, of the best groups."""
    size = len(scores_E) // groups
    choice = [score + bias for score, bias in zip(scores_E, bias_E, strict=True)]

    def group_score(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-best:])

    kept_groups = sorted(range(groups), key=group_score)[-kept:]
    allowed = [expert for expert in range(len(choice)) if expert // size in kept_groups]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
    whole = sum(scores_E[expert] for expert in chosen) if normalize else 1.0
    return {expert: scores_E[expert] / whole for expert in chosen}


def latent_attention_reference(
    q_THd: Tensor, entries_SC: Tensor, up_HcC: Tensor, *, nope_dim: int, start: int, scale: float
) -> Tensor:
    """[T, H, v] float64 of one sequence: every head's keys and values are made of the latents."""
    r = up_HcC.shape[2]
    latent, rotated = entries_SC[:, :r].double(), entries_SC[:, r:].double()
    heads = []
    for h in range(q_THd.shape[1]):
        made = latent @ up_HcC[h].double().T
        k_S1d = torch.cat((made[:, :nope_dim], rotated), dim=-1).unsqueeze(1)
        v_S1v = made[:, nope_dim:].unsqueeze(1)
        heads.append(
            attention_reference(q_THd[:, h : h + 1], k_S1d, v_S1v, start=start, scale=scale)
        )
    return torch.cat(heads, dim=1)


def dequantize_fp8_reference(weight_RC: Tensor, scale_inv: Tensor, block: int) -> Tensor:
    """[R, C] float64: each element times the scale of the square it lies in."""
    out_RC = torch.empty(weight_RC.shape, dtype=torch.float64)
    for row in range(weight_RC.shape[0]):
        for column in range(weight_RC.shape[1]):
            scale = float(scale_inv[row // block, column // block])
            out_RC[row, column] = float(weight_RC[row, column]) * scale
    return out_RC


def dequantize_mxfp4_reference(block: Sequence[int], exponent: int) -> list[float]:
    """The elements of one group: each byte two of them, of sign, two exponent bits (bias 1) and one
    mantissa bit; exponent bits of zero are subnormal."""
    values = []
    for byte in block:
        for nibble in (byte % 16, byte // 16):
            sign, power, half = -1 if nibble & 8 else 1, (nibble >> 1) & 3, nibble & 1
            magnitude = half / 2 if power == 0 else (1 + half / 2) * 2 ** (power - 1)
            values.append(sign * magnitude * 2.0 ** (exponent - 127))
    return values


def delta_net_reference(
    x_TP: Tensor,
    conv_GCw: Tensor,
    decays: tuple[Tensor, Tensor],
    norm_V: Tensor,
    state: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """A gated delta net in float64, one token and key head at a time; changes `state` in place.

    decays: rates [G, R], and biases [G, R], or [G, k] of the rows of a state (R = 1). state: latest
    inputs [G, C - 1, w], states [G, R, k, v].
    Returns [T, G, R, v].
    """
    (rates_GR, biases_GA), (inputs, states) = decays, state
    (G, R, K, V), outs = states.shape, []
    by_row = biases_GA.shape[1] != R
    w = 2 * K + R * V
    for x_P in x_TP.double():
        heads_G, gates_G = x_P[: G * (w + R * V)].view(G, -1), x_P[G * (w + R * V) :].view(G, -1)
        for g in range(G):
            window_Cw = torch.cat((inputs[g], heads_G[g, None, :w]))
            inputs[g] = window_Cw[1:]
            mixed_w = torch.nn.functional.silu((window_Cw * conv_GCw[g].double()).sum(0))
            q_K, k_K = (part / (part.square().sum() + 1e-6).sqrt() for part in
                        (mixed_w[:K], mixed_w[K : 2 * K]))  # fmt: skip
            for r in range(R):
                soft_A = torch.nn.functional.softplus(gates_G[g, R:] + biases_GA[g])
                soft = soft_A[:, None] if by_row else soft_A[r]
                S_KV = states[g, r].mul_((-rates_GR[g, r] * soft).exp())
                v_V = mixed_w[2 * K + r * V : 2 * K + (r + 1) * V]
                S_KV += torch.outer(k_K, (v_V - k_K @ S_KV) * gates_G[g, r].sigmoid())
                out_V = q_K @ S_KV / math.sqrt(K)
                normed_V = out_V / (out_V.square().mean() + eps).sqrt() * norm_V.double()
                z_V = heads_G[g, w + r * V : w + (r + 1) * V]
                outs.append(normed_V * (z_V.sigmoid() * (1.0 if by_row else z_V)))
    return torch.stack(outs).view(-1, G, R, V)
