"""Layers that have states in place of K and V: gated delta net and Kimi's delta attention.

A gated delta net (Yang et al., 2024) decays a whole state; Kimi's (Kimi Team, 2025) each row of it.

Shapes: T tokens, D model dim, G key heads, R value heads per key head, k and v their dims,
w = 2k + Rv, N slots of the pool.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import delta_rule
from kernels.compiled import bits_of
from kernels.linear import PackedLinear
from kernels.steps import Steps, map_tiles, row_tiles
from kernels.thread_pool import shared_pool
from models.decoder.attention import KvPool
from models.decoder.batch import AttentionBatch, AttentionMetadata, LastRows, RecurrencePlan
from models.spec.model import ModelSpec
from models.spec.recurrent import RecurrentSpec
from models.weights.layout import recurrent_tensors
from models.weights.loading import Loader


class GatedDeltaNet:
    """Holds all projections as one matrix [G (w + Rv) + 2 GR, D], for one product."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        assert spec.recurrent is not None
        self._sizes: RecurrentSpec = spec.recurrent
        self._layer = layer
        weight_specs = recurrent_tensors(spec, self._sizes, layer)
        weights = {role: loader.load(weight_spec) for role, weight_spec in weight_specs.items()}
        self._load_inputs(spec, weights)
        self._o = PackedLinear(weights["o"])
        conv_GwC = _by_key_head(weights["conv"].squeeze(1), self._sizes)
        kept = conv_GwC.transpose(1, 2).contiguous(), weights["rates"].exp(), weights["biases"]
        self._kept = (*kept, weights["norm"])
        self._fields = np.array(
            (
                loader.dtype is torch.float32,
                *(self._sizes.key_heads, self._sizes.heads_per_key),
                *(self._sizes.key_dim, self._sizes.value_dim, self._sizes.taps),
                *(tensor.data_ptr() for tensor in self._kept),
                bits_of(spec.rms_norm_eps),
                self._sizes.kind == "by_row",
            ),
            np.int64,
        )

    def _load_inputs(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        G, R = self._sizes.key_heads, self._sizes.heads_per_key
        if self._sizes.kind == "separate":
            qkv = _by_key_head(weights["qkv"], self._sizes)
            z = weights["z"].view(G, -1, spec.hidden_size)
            gates = (weights[role].view(G, R, -1) for role in ("b", "a"))
            weights["qkvz"] = torch.cat((qkv, z), 1).flatten(0, 1)
            weights["ba"] = torch.cat((*gates,), 1).flatten(0, 1)
        self._inputs = PackedLinear(torch.cat((weights["qkvz"], weights["ba"])))

    def _project(self, x_TD: Tensor) -> Tensor:
        """Return rows of `delta_rule.advance`."""
        return self._inputs(x_TD)

    def steps(
        self,
        hidden_TD: Tensor,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> Steps[None]:
        """Add the layer to hidden_TD in place, and advance the states. last: only those rows."""
        inputs_TP = yield from map_tiles(self._project, x_TD)
        plan, G = metadata.recurrence, self._sizes.key_heads
        assert plan is not None
        kept = [_Slots(pool, plan) for pool in kv.entries(self._layer)]
        for to, source in plan.starts:
            for slots in kept:
                slots.start(to, source)
        out_TD = x_TD.new_empty((len(x_TD), self._sizes.value_heads * self._sizes.value_dim))
        for call in plan.calls:
            yield
            entries = np.empty((len(call.runs), delta_rule.ENTRY_COLUMNS), np.int64)
            entries[:, :2] = call.runs[:, :2]
            entries[:, 2], entries[:, 3] = (slots.addresses(call.runs[:, 2]) for slots in kept)
            addresses = inputs_TP.data_ptr(), entries.ctypes.data, len(entries), G
            fields = self._fields.ctypes.data
            delta_rule.advance(shared_pool(), fields, *addresses, out_TD.data_ptr())
            for source, to in call.saves:
                for slots in kept:
                    slots.start(to, source)
        if last is not None:
            out_TD = out_TD.index_select(0, last.rows_R)
        for tile in row_tiles(out_TD):
            yield
            hidden_TD[tile].add_(self._o(out_TD[tile]))


class KimiDeltaAttention(GatedDeltaNet):
    """Delta attention whose decays and gates of the output are products of low rank."""

    def _load_inputs(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        roles = ("q", "k", "v")
        weights["conv"] = torch.cat([weights[f"{role}_conv"] for role in roles])
        qkv = _by_key_head(torch.cat([weights[role] for role in roles]), self._sizes)
        parts = qkv.flatten(0, 1), weights["b"], weights["f_a"], weights["g_a"]
        self._widths = [len(part) for part in parts]
        self._inputs = PackedLinear(torch.cat(parts))
        self._decays, self._gates = PackedLinear(weights["f_b"]), PackedLinear(weights["g_b"])

    def _project(self, x_TD: Tensor) -> Tensor:
        (T, G), d = (len(x_TD), self._sizes.key_heads), self._sizes.key_dim
        qkv, b_TG, low_f, low_g = torch.split(self._inputs(x_TD), self._widths, 1)
        gates, decays = self._gates(low_g.contiguous()), self._decays(low_f.contiguous())
        by_head = torch.cat((qkv.view(T, G, -1), gates.view(T, G, d)), 2)
        scalars = torch.cat((b_TG.unsqueeze(2), decays.view(T, G, d)), 2)
        return torch.cat((by_head.flatten(1), scalars.flatten(1)), 1)


class _Slots:
    """Slots of a pool tensor [N, ...], and temporary ones, whose numbers are negative."""

    def __init__(self, pool: Tensor, plan: RecurrencePlan) -> None:
        self._pool, self._temporary = pool, pool.new_empty((plan.temporary, *pool.shape[1:]))
        self._slot_bytes = pool.stride(0) * pool.element_size()

    def start(self, slot: int, source: int | None) -> None:
        """Set a slot to another one's numbers, or to zeros."""
        if source is None:
            self._at(slot).zero_()
        else:
            self._at(slot).copy_(self._at(source))

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        firsts = np.where(slots < 0, self._temporary.data_ptr(), self._pool.data_ptr())
        addresses: NDArray[np.int64] = firsts + np.maximum(slots, -1 - slots) * self._slot_bytes
        return addresses

    def _at(self, slot: int) -> Tensor:
        return self._temporary[-1 - slot] if slot < 0 else self._pool[slot]


def _by_key_head(weight: Tensor, sizes: RecurrentSpec) -> Tensor:
    """Return rows of all queries, keys and values as [G, w, ...], by key head."""
    G, keys = sizes.key_heads, sizes.key_heads * sizes.key_dim
    parts = weight[:keys], weight[keys : 2 * keys], weight[2 * keys :]
    return torch.cat([part.reshape(G, -1, *weight.shape[1:]) for part in parts], 1)
