"""Attention of one layer, grouped-query or latent, and the tensors of the paged KV pool.

With latent attention (DeepSeek-V2 and V3) the pool holds one entry of kv_rank + rope_dim elements
per token, whatever the number of heads.

Shapes: T tokens, D model dim, H query heads, G KV heads, d head dim (nope_dim + rope_dim of a
latent one), C = kv_rank + rope_dim.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import fused_ops
from kernels.attention import AttentionPlan, attention_steps
from kernels.compiled import bits_of
from kernels.fused_ops import norm_and_rope, sigmoid, write_slots
from kernels.latent_attention import LatentUp, latent_attention_steps
from kernels.layer_ops import LATENT_EPS, PROJECTION_NORM, TURNED_NORM, attend_layer
from kernels.linear import PackedLinear
from kernels.steps import Steps, map_tiles, row_tiles
from kernels.thread_pool import shared_pool
from models.decoder.batch import AttentionBatch, AttentionMetadata, LastRows
from models.experts.expert_half import RoutedTokens
from models.spec.layer_spec import LatentSpec, RopeSpec
from models.spec.model import ModelSpec, kv_elements, kv_entry_shapes
from models.spec.recurrent import RecurrentSpec
from models.weights.layout import WeightSpecs, attention_tensors
from models.weights.loading import Loader


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the pool bytes per token over all layers."""
    return kv_elements(spec) * dtype.itemsize


def state_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the pool bytes of a slot of recurrent states over all layers."""
    if spec.recurrent is None:
        return 0
    shapes = state_shapes(spec.recurrent, dtype)
    return len(spec.recurrent_layers) * sum(
        math.prod(each) * kind.itemsize for each, kind in shapes
    )


_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def state_shapes(sizes: RecurrentSpec, dtype: torch.dtype) -> _Shapes:
    """Return shape and dtype of a slot in a layer: latest inputs of the convolution, and states."""
    inputs = sizes.key_heads, sizes.taps - 1, sizes.mixed_dim
    states = sizes.value_heads, sizes.key_dim, sizes.value_dim
    return (inputs, dtype), (states, torch.float32)


class KvPool:
    """Tensors that sequences own: per layer those of K and V, or of recurrent states.

    K and V: one tensor [P, heads, size] per entry, zeroed so that padding never reads a NaN. Block
    b holds slots b * block_tokens .. (b+1) * block_tokens - 1. States: tensors [num_states, ...] of
    `state_shapes`. one_layer: all layers share the same tensors, for a batch that runs alone
    through all layers and is not read again.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        one_layer: bool = False,
        num_states: int = 0,
    ) -> None:
        self.num_blocks, self.num_states = num_blocks, num_states
        self.block_tokens = block_tokens
        self.device = torch.device(device)
        made: dict[_Shapes, tuple[Tensor, ...]] = {}
        layers: list[tuple[Tensor, ...]] = []
        for layer in range(spec.num_layers):
            if spec.recurrent is not None and layer in spec.recurrent_layers:
                slots, shapes = num_states, state_shapes(spec.recurrent, dtype)
            else:
                slots = num_blocks * block_tokens
                shapes = tuple((shape, dtype) for shape in kv_entry_shapes(spec, layer))
            if not one_layer or shapes not in made:
                made[shapes] = tuple(
                    torch.zeros(slots, *shape, dtype=kind, device=self.device)
                    for shape, kind in shapes
                )
            layers.append(made[shapes])
        self._layers = tuple(layers)
        kept = {id(tensor): tensor.nbytes for layer in self._layers for tensor in layer}
        self.num_bytes = sum(kept.values())

    def entries(self, layer: int) -> tuple[Tensor, ...]:
        """Return (K, V) of a layer, or its latents, each [P, heads, size]; or inputs and states."""
        return self._layers[layer]

    def write(self, layer: int, batch: AttentionBatch, *values: Tensor) -> None:
        """Store one [T, heads, size] tensor per entry, then make the batch's slot copies."""
        for pool, value in zip(self._layers[layer], values, strict=True):
            write_slots(pool, batch.slots_T, value)
            if batch.copies is not None:
                copied = pool.index_select(0, batch.copies.from_C)
                pool.index_copy_(0, batch.copies.to_C, copied)


class DecodeNeighbors(NamedTuple):
    """The norms around a layer's attention, and fields of `attend_layer` of router and MLP."""

    attention_norm_D: Tensor
    mlp_norm_D: Tensor
    norm_kind: int
    router: tuple[int, ...]
    mlp: int
    sum_norm: int

    @property
    def top_k(self) -> int:
        """0: `attend_layer` does not route."""
        return self.router[4]

    @property
    def weighs_input(self) -> bool:
        return bool(self.router[5])


def decodes_at_once(batch: AttentionBatch, plan: AttentionPlan) -> bool:
    """Return whether a batch has few sequences with one new token each, for one call."""
    rows = plan.rows
    return (
        rows is not None
        and batch.copies is None
        and len(rows.table) == batch.num_tokens
        and len(rows.steps) == 1
    )


class CompiledDecode(abc.ABC):
    """Attention of a decode batch in one compiled call."""

    _eps: float
    _scale: float
    _layer: int
    _window: int | None
    _rope: RopeSpec | None
    norms_output = True  # False: the output is summed with that of other heads before the norm
    _decode_layer: NDArray[np.int64] | None = None

    def decode(
        self,
        hidden_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        neighbors: DecodeNeighbors,
    ) -> tuple[Tensor, RoutedTokens | None]:
        """Add attention to hidden_TD in place, in one compiled call.

        Returns the MLP's input, and the routed tokens if the call could route them.
        """
        rows, pools = metadata.plans[self._window].rows, kv.entries(self._layer)
        assert rows is not None
        layer = self.decode_fields(neighbors)
        cos, sin = metadata.angles[self._rope]
        x_TD, (T, top_k) = torch.empty_like(hidden_TD), (len(hidden_TD), neighbors.top_k)
        weighed_TD = torch.empty_like(hidden_TD) if neighbors.weighs_input else x_TD
        ids_TK, weights_TK = torch.empty((T, top_k), dtype=torch.int64), torch.empty((T, top_k))
        fields = (
            T, hidden_TD.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch.slots_T.data_ptr(),
            rows.table.ctypes.data, pools[0].data_ptr(), pools[-1].data_ptr(), x_TD.data_ptr(),
            ids_TK.data_ptr(), weights_TK.data_ptr(), hidden_TD.dtype is torch.float32,
            bits_of(self._scale), 0, weighed_TD.data_ptr(),
            metadata.query_factors(self._rope), 0,
        )  # fmt: skip
        called = np.array(fields, np.int64)
        attend_layer(shared_pool(), layer.ctypes.data, called.ctypes.data)
        plain_TD = x_TD if neighbors.weighs_input else None
        return x_TD, RoutedTokens(weighed_TD, ids_TK, weights_TK, plain_TD) if top_k else None

    def decode_fields(self, neighbors: DecodeNeighbors) -> NDArray[np.int64]:
        """Return the fields of `attend_layer` that do not change, the same array each time."""
        if self._decode_layer is None:
            self._decode_layer = self._layer_fields(neighbors)
        return self._decode_layer

    @abc.abstractmethod
    def _layer_fields(self, neighbors: DecodeNeighbors) -> NDArray[np.int64]: ...

    def _fields(
        self,
        neighbors: DecodeNeighbors,
        sizes: tuple[int, int, int, int],
        queries: tuple[int, int, int],
        o: PackedLinear,
        sinks: int = 0,
        latent: int = 0,
        steps: tuple[int, int] = (0, 0),
        output: tuple[int, int, int] = (0, 0, 0),
    ) -> NDArray[np.int64]:
        """Return the fields of `attend_layer`.

        sizes: H, G, d, and size of a value. queries: q/k/v, bias, q/k norm. steps: kind of that,
        bits of their limit. output: gate and its bias, and norm.
        """
        fields = (
            o.kind, o.shape[0], *sizes[:3], bits_of(self._eps), neighbors.norm_kind,
            neighbors.attention_norm_D.data_ptr(), *queries, *o.addresses, sinks,
            neighbors.mlp_norm_D.data_ptr(), self._window or 0, *neighbors.router, latent,
            neighbors.mlp, *steps, sizes[3], *output, neighbors.sum_norm,
        )  # fmt: skip
        return np.array(fields, np.int64)


class SharedNorm(NamedTuple):
    """A norm of queries and keys over the heads of several workers.

    sizes: elements of all queries, of all keys. counted: this worker's KV heads, without those that
    a worker before it counts. total: sum over workers of [T, 2], for a layer.
    """

    sizes: tuple[int, int]
    counted: list[int]
    total: Callable[[int, Tensor], Tensor]


class GroupedQueryAttention(CompiledDecode):
    """Holds q, k and v as one matrix [(H + G) * d + G * v, D], for one product; v: value dim.

    Elements of query and key heads are reordered on load, alike in both, so that rope rotates pairs
    (i, i + d/2); the angle of pairs that it does not rotate is 0.
    """

    shared_norm: SharedNorm | None = None

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        weight_specs = attention_tensors(spec, layer)
        self._layer = layer
        self._H, self._G, self._d = spec.num_heads, spec.kv_heads(layer), spec.head_dim
        self._v, self._qk = spec.value_dim, (self._H + self._G) * self._d
        self._eps, self._scale = spec.rms_norm_eps, spec.softmax_scale
        self._window = spec.sliding_windows[layer]
        self._rope, self._clip = spec.rope_of(layer), spec.clip_qkv
        order = _rope_order(spec)

        gates: list[Tensor] = []

        def load(kind: str) -> Tensor:
            weight = loader.load(*(weight_specs[f"{role}{kind}"] for role in ("q", "k", "v")))
            if spec.family.gates_queries:  # a head's gates follow its query
                weight, head_gates = _without_gates(weight, self._H, self._d)
                gates.append(head_gates)
            if order is not None:
                turned = weight[: self._qk].view(self._H + self._G, self._d, -1)
                turned.copy_(turned[:, order])
            if spec.value_scale != 1.0:
                weight[self._qk :].mul_(spec.value_scale)
            return weight

        self._qkv = PackedLinear(load(""), load("_bias") if spec.attention_bias else None)
        biases = [weight_specs["o_bias"]] if "o_bias" in weight_specs else []
        self._o = loader.linear(weight_specs["o"], bias=biases)
        self._gate = loader.linear(weight_specs["gate"]) if "gate" in weight_specs else None
        norm = weight_specs.get("out_norm")
        self.out_norm = None if norm is None else loader.load(norm)
        self._norm_rounds_once = spec.family.norm_rounds_once
        self._is_tuned = spec.query_tuning is not None and self._rope is None
        if gates:
            self._gate = PackedLinear(*gates)
        self._sinks = loader.load(weight_specs["sinks"]) if "sinks" in weight_specs else None
        self._qk_norm, self._qk_norm_Hd = spec.qk_norm, self._load_norm(spec, weight_specs, loader)
        if self._qk_norm == "plain_head" and spec.rope.attention_factor != 1.0:
            self._qk_norm = "turned_head"  # rope changes the size of a head
        if self._qk_norm_Hd is None:
            self._qk_norm = ""
        if order is not None and self._qk_norm_Hd is not None:
            self._qk_norm_Hd = self._qk_norm_Hd[:, order].contiguous()

    def _load_norm(self, spec: ModelSpec, specs: WeightSpecs, loader: Loader) -> Tensor | None:
        """Return the weights of query heads, then KV heads, [H + G, d]; None: not normed."""
        if spec.qk_norm == "plain_head" and self._rope is not None:
            return torch.ones_like(loader.empty(self._H + self._G, self._d))
        if "q_norm" not in specs:
            return None
        q_norm, k_norm = (loader.load(specs[role]) for role in ("q_norm", "k_norm"))
        if spec.qk_norm == "projection":
            return torch.cat((q_norm, k_norm)).view(-1, self._d)
        return torch.stack([q_norm] * self._H + [k_norm] * self._G)

    def steps(
        self,
        hidden_TD: Tensor,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> Steps[None]:
        """Add attention to hidden_TD in place, and write K and V. last: only for those rows."""
        q_THd, k_TGd, v_TGd = yield from self._project(x_TD, metadata, last)
        yield
        # All rows before attention: sequences may read entries of others in this batch.
        kv.write(self._layer, batch, k_TGd, v_TGd)
        if last is not None:
            metadata = last.metadata
            k_TGd, v_TGd = (x.index_select(0, last.rows_R) for x in (k_TGd, v_TGd))
            x_TD = x_TD if self._gate is None else x_TD.index_select(0, last.rows_R)
        yield
        k_pool, v_pool = kv.entries(self._layer)
        plan = metadata.plans[self._window]
        attended_THd = yield from attention_steps(
            q_THd, k_TGd, v_TGd, k_pool, v_pool, plan, scale=self._scale, sinks_H=self._sinks
        )
        attended_TD = attended_THd.flatten(1)
        for tile in row_tiles(attended_TD):
            yield
            if self._gate is not None:
                attended_TD[tile].mul_(sigmoid(self._gate(x_TD[tile])))
            y_TD = self._o(attended_TD[tile])
            if self.out_norm is not None and self.norms_output:
                once = self._norm_rounds_once
                y_TD = fused_ops.rms_norm(y_TD, self.out_norm, self._eps, round_once=once)
            hidden_TD[tile].add_(y_TD)

    @property
    def decodes(self) -> bool:
        """True if `decode` can run batches for which `decodes_at_once`."""
        return self._qkv.kind is not None

    def _layer_fields(self, neighbors: DecodeNeighbors) -> NDArray[np.int64]:
        qk_norm, sinks = (
            0 if weight is None else weight.data_ptr() for weight in (self._qk_norm_Hd, self._sinks)
        )
        queries = *self._qkv.addresses, qk_norm
        sizes = self._H, self._G, self._d, self._v
        kinds = {"projection": PROJECTION_NORM, "turned_head": TURNED_NORM}
        steps = kinds.get(self._qk_norm, 0), 0 if self._clip is None else bits_of(self._clip)
        gate = (0, 0) if self._gate is None else self._gate.addresses
        output = *gate, 0 if self.out_norm is None else self.out_norm.data_ptr()
        return self._fields(neighbors, sizes, queries, self._o, sinks, steps=steps, output=output)

    def _project(
        self, x_TD: Tensor, metadata: AttentionMetadata, last: LastRows | None
    ) -> Steps[tuple[Tensor, Tensor, Tensor]]:
        """Return queries, keys and values, normed and rotated. last: queries of those rows only."""
        T, H, G, both = len(x_TD), self._H, self._G, slice(0, self._H + self._G)
        tiles = list(row_tiles(x_TD))
        if last is None and len(tiles) > 1 and self.shared_norm is None:  # within the cache
            qk_THd, v_TGv = (
                x_TD.new_empty((T, heads, size)) for heads, size in ((H + G, self._d), (G, self._v))
            )
            for tile in tiles:
                qk, values = self._split(self._qkv(x_TD[tile]))
                yield
                qk_THd[tile] = self._norm_and_rotate(qk, both, metadata, tile)
                v_TGv[tile] = self._clipped(values)
                yield
            return qk_THd[:, :H], qk_THd[:, H:], v_TGv
        qk, v_TGv = self._split((yield from map_tiles(self._qkv, x_TD)))
        self._divide_by_rms(qk)
        yield
        if last is None:
            qk = self._norm_and_rotate(qk, both, metadata, slice(None))
            return qk[:, :H], qk[:, H:], self._clipped(v_TGv)
        k_TGd = yield from self._turned(qk[:, H:], slice(H, H + G), metadata)
        q_RHd = qk[:, :H].index_select(0, last.rows_R)
        q_RHd = yield from self._turned(q_RHd, slice(0, H), last.metadata)
        return q_RHd, k_TGd, self._clipped(v_TGv)

    def _split(self, qkv_TP: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [T, H + G, d], and values [T, G, v]."""
        qk, values = qkv_TP[:, : self._qk], qkv_TP[:, self._qk :]
        T = len(qkv_TP)
        return qk.view(T, -1, self._d), values.view(T, -1, self._v)

    def _turned(self, x_THd: Tensor, heads: slice, metadata: AttentionMetadata) -> Steps[Tensor]:
        """Norm and rotate `heads` of a whole batch, tile by tile."""
        out_THd = x_THd.new_empty(x_THd.shape)
        for tile in row_tiles(x_THd):
            out_THd[tile] = self._norm_and_rotate(x_THd[tile], heads, metadata, tile)
            yield
        return out_THd

    def _norm_and_rotate(
        self, x_THd: Tensor, heads: slice, metadata: AttentionMetadata, rows: slice
    ) -> Tensor:
        """Norm and rotate `heads` (query heads, then KV heads) of rows of a batch."""
        cos, sin = (angles[rows] for angles in metadata.angles[self._rope])
        weight_Hd = None if self._qk_norm_Hd is None else self._qk_norm_Hd[heads]
        if weight_Hd is None or self._qk_norm in ("head", "plain_head"):
            turned_THd = norm_and_rope(self._clipped(x_THd), weight_Hd, self._eps, cos, sin)
        elif self._qk_norm == "turned_head":
            turned_THd = norm_and_rope(x_THd, None, self._eps, cos, sin)
            turned_THd = self._normed(turned_THd, weight_Hd, heads)
        else:
            x_THd = self._clipped(self._normed(x_THd, weight_Hd, heads))
            turned_THd = norm_and_rope(x_THd, None, self._eps, cos, sin)
        if self._is_tuned and metadata.query_scale_T11 is not None:
            turned_THd[:, : max(0, self._H - heads.start)] *= metadata.query_scale_T11[rows]
        return turned_THd

    def _divide_by_rms(self, qk_THd: Tensor) -> None:
        """Divide by root mean squares over the heads of all workers, in place."""
        norm, H = self.shared_norm, self._H
        if norm is None:
            return
        q_THd, k_TGd = qk_THd[:, :H], qk_THd[:, H:]
        counted = q_THd, k_TGd[:, norm.counted]
        squares_T2 = torch.stack([part.float().square().sum((1, 2)) for part in counted], 1)
        means_T2 = norm.total(self._layer, squares_T2) / torch.tensor(norm.sizes)
        factors_T2 = (means_T2 + self._eps).rsqrt()[..., None, None]
        q_THd.mul_(factors_T2[:, 0])
        k_TGd.mul_(factors_T2[:, 1])

    def _normed(self, x_THd: Tensor, weight_Hd: Tensor, heads: slice) -> Tensor:
        """Norm queries and keys, whole or by head, in which case heads of a kind share weights."""
        if self.shared_norm is not None:
            return x_THd * weight_Hd
        queries, is_whole = max(0, self._H - heads.start), self._qk_norm == "projection"
        sizes = [size for size in (queries, x_THd.shape[1] - queries) if size]
        parts = []
        pairs = zip(torch.split(x_THd, sizes, 1), torch.split(weight_Hd, sizes), strict=True)
        for part, weight in pairs:
            rows, norm = (part.flatten(1), weight.flatten()) if is_whole else (part, weight[0])
            parts.append(fused_ops.rms_norm(rows.contiguous(), norm, self._eps).view(part.shape))
        return torch.cat(parts, 1)

    def _clipped(self, x_THd: Tensor) -> Tensor:
        return x_THd if self._clip is None else x_THd.clamp(-self._clip, self._clip)


def _without_gates(weight: Tensor, H: int, d: int) -> tuple[Tensor, Tensor]:
    """Return the rows of q, k and v, and those of the gates."""
    heads = weight.view(-1, d, *weight.shape[1:])
    qkv = torch.cat((heads[: 2 * H : 2], heads[2 * H :]))
    return qkv.flatten(0, 1), heads[1 : 2 * H : 2].flatten(0, 1)


def _rope_order(spec: ModelSpec) -> list[int] | None:
    """Return the element of a stored head at each place of a reordered one; None: the same."""
    rotated, d = spec.rope_dim, spec.head_dim
    rest = list(range(rotated, d))
    middle = len(rest) // 2
    if spec.family.interleaved_rope:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    order = [*first, *rest[:middle], *second, *rest[middle:]]
    return None if order == list(range(d)) else order


class LatentAttention(CompiledDecode):
    """Rotated rows are reordered on load, from interleaved pairs to halves, alike in q and k."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        assert spec.latent is not None
        self._latent: LatentSpec = spec.latent
        self._layer = layer
        self._H, self._d = spec.num_heads, spec.head_dim
        self._eps, self._scale = spec.rms_norm_eps, spec.softmax_scale
        self._window, self._rope = spec.sliding_windows[layer], spec.rope_of(layer)
        weight_specs = attention_tensors(spec, layer)
        weights = {role: loader.load(weight_spec) for role, weight_spec in weight_specs.items()}
        if self._latent.interleaved:
            for role, heads in (("q", self._H), ("q_b", self._H), ("kv_a", 1), ("kv_a_bias", 1)):
                if role in weights:
                    by_head = weights[role].view(heads, -1, *weights[role].shape[1:])
                    to_halves(by_head[:, -self._latent.rope_dim :])
        self._queries = PackedLinear(weights["q"]) if "q" in weights else LowRankQueries(weights)
        self._kv_a = PackedLinear(weights["kv_a"], weights.get("kv_a_bias"))
        self._kv_norm = weights["kv_norm"]
        self._o = PackedLinear(weights["o"], weights.get("o_bias"))
        up_HcC = weights["kv_b"].view(self._H, -1, self._latent.kv_rank)
        self._up = LatentUp(up_HcC, self._latent.nope_dim)

    def steps(
        self,
        hidden_TD: Tensor,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> Steps[None]:
        """Add attention to hidden_TD in place, and write latents. last: only for those rows."""
        latent_T1C = (yield from map_tiles(self._kv_a, x_TD)).unsqueeze(1)
        rank = self._latent.kv_rank
        plain, turned = latent_T1C[..., :rank], latent_T1C[..., rank:]
        plain.copy_(fused_ops.rms_norm(plain.contiguous(), self._kv_norm, LATENT_EPS))
        self._rotate(turned, metadata)
        yield
        # All rows before attention: sequences may read entries of others in this batch.
        kv.write(self._layer, batch, *(yield from self._entries(latent_T1C, x_TD, metadata)))
        if last is not None:
            metadata = last.metadata
            x_TD, latent_T1C = (x.index_select(0, last.rows_R) for x in (x_TD, latent_T1C))
        n = self._latent.nope_dim
        yield
        q_TD = yield from map_tiles(self._queries, x_TD)
        q_THd = q_TD.view(-1, self._H, self._d)
        self._rotate(q_THd[..., n:], metadata)
        yield
        pool_P1C = kv.entries(self._layer)[0]
        plan = yield from self._plan(x_TD, batch, metadata, kv, last)
        attended_THv = yield from latent_attention_steps(
            q_THd, latent_T1C, pool_P1C, self._up, plan, scale=self._scale
        )
        attended_TD = attended_THv.view(x_TD.shape[0], -1)
        for tile in row_tiles(attended_TD):
            yield
            hidden_TD[tile].add_(self._o(attended_TD[tile]))

    def _entries(
        self, latent_T1C: Tensor, x_TD: Tensor, metadata: AttentionMetadata
    ) -> Steps[tuple[Tensor, ...]]:
        """Return the entries of new tokens."""
        return (latent_T1C,)
        yield

    def _plan(
        self,
        x_TD: Tensor,
        batch: AttentionBatch,
        metadata: AttentionMetadata,
        kv: KvPool,
        last: LastRows | None,
    ) -> Steps[AttentionPlan]:
        """Return the plan of rows of x."""
        return metadata.plans[self._window]
        yield

    @property
    def decodes(self) -> bool:
        """True if `decode` can run batches for which `decodes_at_once`."""
        return self._o.kind is not None

    def _layer_fields(self, neighbors: DecodeNeighbors) -> NDArray[np.int64]:
        latent, low, q = self._latent, (0, 0, 0), self._queries
        if isinstance(q, LowRankQueries):
            low, q = (*q.a.addresses, q.norm.data_ptr()), q.b
        fields = (
            latent.nope_dim, latent.rope_dim, latent.value_dim, latent.kv_rank, latent.q_rank or 0,
            *low, q.addresses[0], *self._kv_a.addresses, self._kv_norm.data_ptr(),
            *self._up.panels,
        )  # fmt: skip
        self._decode_latent = np.array(fields, np.int64)  # whose address the layer's fields have
        sizes, at = (
            (self._H, 0, latent.value_dim, latent.value_dim),
            self._decode_latent.ctypes.data,
        )
        return self._fields(neighbors, sizes, (0, 0, 0), self._o, latent=at)

    def _rotate(self, x_THp: Tensor, metadata: AttentionMetadata) -> None:
        """Rotate heads in place."""
        if self._rope is not None:
            angles = metadata.angles[self._rope]
            x_THp.copy_(norm_and_rope(x_THp.contiguous(), None, 0.0, *angles))


class LowRankQueries:
    """b @ norm(a @ x)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.a = PackedLinear(weights["q_a"], weights.get("q_a_bias"))
        self.norm = weights["q_norm"]
        self.b = PackedLinear(weights["q_b"])

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.b(self.low_rank(x_TD))

    def low_rank(self, x_TD: Tensor) -> Tensor:
        return fused_ops.rms_norm(self.a(x_TD), self.norm, LATENT_EPS)


def to_halves(rows_Hp: Tensor) -> None:
    """Reorder rows of each head [H, p, ...] in place: even ones first, then odd ones."""
    rows_Hp.copy_(torch.cat((rows_Hp[:, 0::2], rows_Hp[:, 1::2]), dim=1))
