"""Qwen3-MoE for training on a CPU, on the parameters of `Qwen3MoeForCausalLM` itself.

Same mathematics as `transformers`, several times faster at these sizes: products in bfloat16, one
sort per layer instead of a mask per expert, plain products instead of the CPU flash attention,
whose backward pass is slow on short rows, and logits only where there is a loss. `equal_logits`
compares the two.

Shapes: T tokens = B rows * S positions, D model dim, F expert FFN dim, E experts, K top-k, N = T *
K, P slots of the sorted pairs.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ALIGN_SLOTS = 64
LONG_ROW_TOKENS = 320  # from here on, flash attention is the faster one


def make_config(vocab_tokens: int, end_id: int, pad_id: int) -> Qwen3MoeConfig:
    """Return the architecture of the bundled checkpoint."""
    return Qwen3MoeConfig(
        vocab_size=vocab_tokens,
        hidden_size=192,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        intermediate_size=384,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=end_id,
        pad_token_id=pad_id,
        bos_token_id=None,
        use_sliding_window=False,
        router_aux_loss_coef=0.01,
    )


class ForwardOutput(NamedTuple):
    """Hidden states after the last norm, and the mean balancing loss of the layers (1 = even)."""

    hidden_TD: Tensor
    balance_loss: Tensor


class _Slots(NamedTuple):
    """Position of each (token, expert) pair when pairs are sorted by expert, P slots in all.

    Every expert's segment is padded to a multiple of `ALIGN_SLOTS` (with token 0), because the CPU
    library compiles a kernel per shape and would otherwise compile most of the time:

        |expert 0 .......|pad|expert 1 ....|pad|expert 2 ..........|pad| ...
        0                  ends_E[0]         ends_E[1]               ends_E[2]
    """

    token_P: Tensor
    slot_N: Tensor  # slot of pair n = t * K + k
    ends_E: Tensor


def _slots(topk_TK: Tensor, experts: int) -> _Slots:
    flat_N = topk_TK.flatten()
    order_N = flat_N.argsort()
    counts_E = flat_N.bincount(minlength=experts)
    room_E = (counts_E + ALIGN_SLOTS - 1) // ALIGN_SLOTS * ALIGN_SLOTS
    padding_E = room_E - counts_E
    shift_E = padding_E.cumsum(0) - padding_E  # padding before the segment of each expert
    slot_N = torch.empty_like(order_N)
    slot_N[order_N] = torch.arange(order_N.numel()) + shift_E[flat_N[order_N]]
    ends_E = room_E.cumsum(0)
    token_P = torch.zeros(int(ends_E[-1]), dtype=torch.long)
    token_P[slot_N] = torch.arange(flat_N.numel()) // topk_TK.shape[1]
    return _Slots(token_P, slot_N, ends_E)


def _experts(
    x_TD: Tensor, topk_TK: Tensor, weight_TK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Return the sum over k of weight[t, k] * expert[topk[t, k]](x[t])."""
    slots = _slots(topk_TK, gate_up_E2FD.shape[0])
    ends_E = slots.ends_E.int()
    h_P2F = functional.grouped_mm(x_TD[slots.token_P], gate_up_E2FD.mT, offs=ends_E)
    gate_PF, up_PF = h_P2F.chunk(2, -1)
    y_PD = functional.grouped_mm(functional.silu(gate_PF) * up_PF, down_EDF.mT, offs=ends_E)
    y_TKD = y_PD[slots.slot_N].view(*topk_TK.shape, -1)
    return (y_TKD * weight_TK[..., None].to(y_TKD.dtype)).sum(1)


class Noise:
    """Dropout masks cut from one pool, since generating them costs more than the products."""

    def __init__(self, rate: float, elements: int = 1 << 23) -> None:
        self._rate = rate
        keep = torch.rand(elements) >= rate
        self._pool = keep.to(torch.bfloat16) / (1 - rate)

    def drop(self, x: Tensor) -> Tensor:
        """Zero a fraction `rate` of the elements of `x` and scale up the rest."""
        if self._rate == 0:
            return x
        start = int(torch.randint(0, self._pool.numel() - x.numel(), ()))
        return x * self._pool[start : start + x.numel()].view_as(x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FastForward:
    """Forward pass over the parameters of one `Qwen3MoeForCausalLM`."""

    def __init__(self, model: Qwen3MoeForCausalLM, dtype: torch.dtype = torch.bfloat16) -> None:
        self._model: Any = model
        self._config = model.config
        self._dtype = dtype
        half = self._config.head_dim // 2
        theta = self._config.rope_parameters["rope_theta"]
        angles = torch.outer(torch.arange(2048.0), theta ** (-torch.arange(half) / half))
        self._cos, self._sin = angles.cos(), angles.sin()

    def _attention(self, layer: Any, x_TD: Tensor, rows: int) -> Tensor:
        part, config = layer.self_attn, self._config
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        weight = torch.cat((part.q_proj.weight, part.k_proj.weight, part.v_proj.weight)).to(
            self._dtype
        )
        qkv = (
            functional.linear(x_TD, weight)
            .view(rows, -1, heads + 2 * kv_heads, dim)
            .transpose(1, 2)
        )
        length = qkv.shape[2]
        cos, sin = self._cos[:length], self._sin[:length]
        q = _rotate(
            _rms_norm(qkv[:, :heads].float(), part.q_norm.weight, config.rms_norm_eps), cos, sin
        )
        k = qkv[:, heads : heads + kv_heads].float()
        k = _rotate(_rms_norm(k, part.k_norm.weight, config.rms_norm_eps), cos, sin)
        q, k, v = q.to(self._dtype), k.to(self._dtype), qkv[:, heads + kv_heads :]
        if length > LONG_ROW_TOKENS:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return functional.linear(
                out.transpose(1, 2).reshape(x_TD.shape[0], -1), part.o_proj.weight.to(self._dtype)
            )
        repeat = heads // kv_heads
        q = q.reshape(
            rows * kv_heads, repeat * length, dim
        )  # the heads of one group read one key head
        k, v = k.reshape(rows * kv_heads, length, dim), v.reshape(rows * kv_heads, length, dim)
        scores = torch.baddbmm(
            self._mask(length, repeat), q, k.transpose(1, 2), alpha=1 / math.sqrt(dim)
        )
        out = torch.bmm(scores.softmax(-1), v).view(rows, heads, length, dim)
        return functional.linear(
            out.transpose(1, 2).reshape(x_TD.shape[0], -1), part.o_proj.weight.to(self._dtype)
        )

    def _mask(self, length: int, repeat: int) -> Tensor:
        return (
            torch.full((length, length), -torch.inf, dtype=self._dtype)
            .triu(1)
            .repeat(repeat, 1)[None]
        )

    def _moe(self, layer: Any, x_TD: Tensor, valid_T1: Tensor) -> tuple[Tensor, Tensor]:
        part, config = layer.mlp, self._config
        probs_TE = functional.linear(x_TD, part.gate.weight).softmax(-1)
        top_TK, topk_TK = probs_TE.topk(config.num_experts_per_tok, -1)
        weight_TK = top_TK / top_TK.sum(-1, keepdim=True)
        gate_up, down = (
            part.experts.gate_up_proj.to(self._dtype),
            part.experts.down_proj.to(self._dtype),
        )
        out = _experts(x_TD.to(self._dtype), topk_TK, weight_TK, gate_up, down)
        with torch.no_grad():
            load_E = torch.zeros(config.num_experts)
            load_E.index_add_(0, topk_TK.flatten(), valid_T1.expand_as(topk_TK).flatten())
            load_E /= load_E.sum()
        mean_prob_E = (probs_TE * valid_T1).sum(0) / valid_T1.sum()
        return out, config.num_experts * (load_E * mean_prob_E).sum()

    def __call__(
        self, ids_BS: Tensor, valid_BS: Tensor, noise: Noise | None = None
    ) -> ForwardOutput:
        """Return hidden states of `ids`, padded on the right, outside of causal attention."""
        base, rows = self._model.model, ids_BS.shape[0]
        eps = self._config.rms_norm_eps
        x_TD = functional.embedding(ids_BS.flatten(), base.embed_tokens.weight)
        x_TD = noise.drop(x_TD) if noise else x_TD
        valid_T1 = valid_BS.flatten()[:, None].float()
        losses = []
        for layer in base.layers:
            normed = _rms_norm(x_TD, layer.input_layernorm.weight, eps).to(self._dtype)
            branch = self._attention(layer, normed, rows)
            x_TD = x_TD + (noise.drop(branch) if noise else branch)
            normed = _rms_norm(x_TD, layer.post_attention_layernorm.weight, eps)
            branch, loss = self._moe(layer, normed, valid_T1)
            x_TD = x_TD + (noise.drop(branch) if noise else branch)
            losses.append(loss)
        return ForwardOutput(_rms_norm(x_TD, base.norm.weight, eps), torch.stack(losses).mean())

    def logits(self, hidden_TD: Tensor, positions: Tensor) -> Tensor:
        """Return logits [positions, vocab] in float32."""
        weight = self._model.lm_head.weight.to(self._dtype)
        return functional.linear(hidden_TD[positions].to(self._dtype), weight).float()


@torch.no_grad()
def equal_logits(model: Qwen3MoeForCausalLM, ids_BS: Tensor) -> float:
    """Return the maximum absolute difference between these float32 logits and `transformers`'."""
    fast = FastForward(model, torch.float32)
    ours = fast.logits(
        fast(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool)).hidden_TD,
        torch.arange(ids_BS.numel()),
    )
    theirs = model.eval()(input_ids=ids_BS).logits.flatten(0, 1)
    return float((ours - theirs).abs().max())
