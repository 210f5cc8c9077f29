"""The attention half of a decoder: everything but the routed experts.

Shapes: T tokens, D model dim, K top-k, R chosen rows, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from contracts.errors import CheckpointError
from kernels.attention import AttentionPlan, plan_attention, plan_on_device
from kernels.attention_ops import SequenceRows
from kernels.compiled import bits_of
from kernels.device import runs_on_device
from kernels.experts import swiglu
from kernels.fused_ops import cos_sin, layer_norm, rms_norm
from kernels.layer_ops import finish_rows
from kernels.linear import PackedLinear
from kernels.paged_attention import supports_packed
from kernels.pages import Seen, split_keys
from kernels.row_ops import LAYER_NORM
from kernels.steps import LIGHT_ROWS, Steps, map_tiles, row_tiles, run_to_end
from kernels.thread_pool import shared_pool
from models.decoder.attention import (
    CompiledDecode,
    DecodeNeighbors,
    GroupedQueryAttention,
    KvPool,
    LatentAttention,
    SharedNorm,
    decodes_at_once,
)
from models.decoder.batch import (
    AttentionBatch,
    AttentionMetadata,
    LastRows,
    RecurrencePlan,
    plan_recurrence,
)
from models.decoder.delta_net import GatedDeltaNet, KimiDeltaAttention
from models.decoder.sparse_attention import SparseLatentAttention, split_at
from models.experts.expert_half import ExpertRouter, RoutedTokens
from models.spec.layer_spec import RopeSpec
from models.spec.model import ModelSpec
from models.weights import layout
from models.weights.checkpoint import Checkpoint
from models.weights.loading import Loader, Progress

_CALL_ELEMENTS = 1 << 25  # of states that a call changes: a few milliseconds
_KNOWN_POSITIONS = 1 << 14  # whose cos and sin are kept on the CPU


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionOutput:
    """The residual hidden_TD; with `routed`, the experts' output must be added to it."""

    hidden_TD: Tensor
    routed: RoutedTokens | None


class _Mlp:
    def __init__(self, weight_specs: layout.WeightSpecs, loader: Loader) -> None:
        roles = ("gate_up",) if "gate_up" in weight_specs else ("gate", "up")
        self._gate_up = loader.linear(*(weight_specs[role] for role in roles))
        self._down = loader.linear(weight_specs["down"])
        gate = weight_specs.get("output_gate")
        self._output_gate = None if gate is None else loader.linear(gate)
        self.decode_fields: NDArray[np.int64] | None = None
        if self._gate_up.kind is not None:
            products = self._gate_up, self._down, self._output_gate
            addresses = (0 if each is None else each.addresses[0] for each in products)
            fields = self._gate_up.kind, *addresses, self._down.shape[1]
            self.decode_fields = np.array(fields, np.int64)  # of `run_layer_mlp`

    def __call__(self, x_TD: Tensor) -> Tensor:
        return swiglu(x_TD, self._gate_up, self._down, self._output_gate)


class _Layer:
    """A layer without its routed experts: `mlp` is the router, or the whole MLP if dense."""

    def __init__(self, spec: ModelSpec, layer: int, loader: Loader) -> None:
        weight_specs = layout.norm_tensors(spec, layer)
        self.attention_norm = _load_norm(weight_specs, "attention_norm", loader)
        self.mlp_norm = _load_norm(weight_specs, "mlp_norm", loader)
        self.attention = _mixer(spec, layer, loader)
        self.mlp_out_norm: Tensor | None = None
        if "mlp_out_norm" in weight_specs:
            self.mlp_out_norm = loader.load(weight_specs["mlp_out_norm"])
        self.mlp: ExpertRouter | _Mlp = (
            ExpertRouter(spec, layer, loader)
            if spec.is_moe(layer)
            else _Mlp(layout.dense_tensors(spec, layer), loader)
        )
        shared = layout.shared_tensors(spec, layer)
        self.shared = _Mlp(shared, loader) if shared else None
        router, mlp = None, self.shared
        if isinstance(self.mlp, ExpertRouter):
            router = self.mlp.decode_fields
        else:
            mlp = self.mlp
        self._has_fields = router is not None or mlp is self.mlp
        self.neighbors = DecodeNeighbors(
            self.attention_norm,
            self.mlp_norm,
            _norm_kind(spec),
            router or (0,) * 6,
            0 if mlp is None or mlp.decode_fields is None else mlp.decode_fields.ctypes.data,
            0 if self.mlp_out_norm is None else self.mlp_out_norm.data_ptr(),
        )

    def decode_fields(self) -> NDArray[np.int64] | None:
        """Return the fields of `attend_layer`, or None if decode has steps of other kinds."""
        attention = self.attention
        if not isinstance(attention, CompiledDecode) or not attention.decodes:
            return None
        return attention.decode_fields(self.neighbors) if self._has_fields else None


def _mixer(
    spec: ModelSpec, layer: int, loader: Loader
) -> GroupedQueryAttention | LatentAttention | GatedDeltaNet:
    kind = GroupedQueryAttention if spec.latent is None else LatentAttention
    if spec.indexer is not None:
        kind = SparseLatentAttention
    if spec.recurrent is not None and layer in spec.recurrent_layers:
        is_kimi = spec.recurrent.kind == "by_row"
        return (KimiDeltaAttention if is_kimi else GatedDeltaNet)(spec, layer, loader)
    return kind(spec, layer, loader)


def _norm_kind(spec: ModelSpec) -> int:
    return LAYER_NORM if spec.family.layer_norm else int(spec.family.norm_rounds_once)


def _load_norm(weight_specs: layout.WeightSpecs, role: str, loader: Loader) -> Tensor:
    """Return the weight of a norm [D], or weight and bias [2D] of a LayerNorm."""
    roles = [role, f"{role}_bias"] if f"{role}_bias" in weight_specs else [role]
    return loader.load(*(weight_specs[each] for each in roles))


class AttentionHalf:
    """Embedding, attention, routers, dense and shared MLPs, final norm and head."""

    def __init__(self, spec: ModelSpec, loader: Loader, dtype: torch.dtype, device: torch.device):
        self.spec = spec
        self.dtype = dtype
        self.device = device
        outer = layout.outer_tensors(spec)
        self.embedding_VD = loader.load(outer["embed"])
        self._final_norm = _load_norm(outer, "final_norm", loader)
        head = loader.load(outer["head"]) if "head" in outer else self.embedding_VD
        bias = loader.load(outer["head_bias"]) if "head_bias" in outer else None
        self._head = PackedLinear(head, bias)
        self._head_fields: NDArray[np.int64] | None = None  # of `finish_rows`
        if self._head.kind is not None:
            sizes, numbers = reversed(self._head.shape), (spec.rms_norm_eps, spec.logits_scale)
            norm = _norm_kind(spec), *map(bits_of, numbers), self._final_norm.data_ptr()
            fields = self._head.kind, *sizes, *norm, *self._head.addresses
            self._head_fields = np.array(fields, np.int64)
        loader.finish_layer()
        self._layers: list[_Layer] = []
        for layer in range(spec.num_layers):
            self._layers.append(_Layer(spec, layer, loader))
            loader.finish_layer()
        self.layers_by_rope: dict[RopeSpec | None, list[int]] = {}
        for layer in range(spec.num_layers):
            self.layers_by_rope.setdefault(spec.rope_of(layer), []).append(layer)
        self._angles = {
            rope: _angles(spec, rope, device) for rope in self.layers_by_rope if rope is not None
        }
        is_cpu = device.type == "cpu"
        self._known = min(_KNOWN_POSITIONS, spec.max_context_tokens) if is_cpu else 0
        self._known_turns = self._turns(torch.arange(self._known, device=device))
        self._windows = tuple(dict.fromkeys(spec.sliding_windows))
        chunked = spec.family.windows == "chunks"
        self.seen_keys = {
            window: Seen(
                window or 0, chunked and window is not None, _split_keys(spec, dtype, window)
            )
            for window in self._windows
        }

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> AttentionHalf:
        """Read only this half's tensors. Raises CheckpointError."""
        device = torch.device(device)
        part = "recurrent layers" if spec.recurrent else "indexers" if spec.indexer else None
        if part is not None and device.type != "cpu":
            raise CheckpointError(
                f"{checkpoint.folder}: {spec.architecture} has {part}, which do not run on"
                f" {device.type}; set groups.device=cpu"
            )
        whole = layout.total_bytes(layout.attention_half_tensors(spec), dtype.itemsize)
        loader = Loader(checkpoint, dtype, device, progress, whole)
        return AttentionHalf(spec, loader, dtype, device)

    def with_heads(self, spec: ModelSpec, loader: Loader, norm: SharedNorm | None) -> AttentionHalf:
        """Return a half with other attention, of the heads of `spec`, for `partial_steps`."""
        half, layers = copy.copy(self), list[_Layer]()
        for number, layer in enumerate(self._layers):
            attention = _mixer(spec, number, loader)
            if isinstance(attention, CompiledDecode):
                attention.norms_output = False
            if isinstance(attention, GroupedQueryAttention):
                attention.shared_norm = norm
            layers.append(copy.copy(layer))
            layers[-1].attention = attention
            loader.finish_layer()
        half.spec, half._layers = spec, layers
        return half

    def prepare(self, batch: AttentionBatch) -> AttentionMetadata:
        """Rope tables and attention plans of `batch`, made once and kept in it."""
        if batch.metadata is None:
            sequences: Sequence[SequenceRows] = batch.sequences
            sparse = None
            if self.spec.indexer is not None:
                sequences, sparse = split_at(batch.sequences, self.spec.indexer.top_k)
            plans = {window: self._plan(batch, sequences, window) for window in self._windows}
            others = self._query_scale(batch.positions_T), self._plan_recurrence(batch), sparse
            batch.metadata = AttentionMetadata(self._cos_sin(batch), plans, *others)
        return batch.metadata

    def _turns(self, positions_T: Tensor) -> dict[RopeSpec | None, tuple[Tensor, Tensor]]:
        return {
            rope: cos_sin(positions_T, inv_freq, factor=factor, dtype=self.dtype)
            for rope, (inv_freq, factor) in self._angles.items()
        }

    def _cos_sin(self, batch: AttentionBatch) -> dict[RopeSpec | None, tuple[Tensor, Tensor]]:
        positions_T = batch.positions_T
        if max(seq.context for seq in batch.sequences) > self._known:
            found = self._turns(positions_T)
        else:  # MKL's cos would wake threads for a few rows
            found = {
                rope: (cos.index_select(0, positions_T), sin.index_select(0, positions_T))
                for rope, (cos, sin) in self._known_turns.items()
            }
        if None in self.layers_by_rope:
            pairs = (self.spec.rope_dim if self.spec.latent else self.spec.head_dim) // 2
            ones = torch.ones(
                (len(positions_T), 1, pairs), dtype=self.dtype, device=positions_T.device
            )
            found[None] = ones, torch.zeros_like(ones)
        return found

    def _plan(
        self, batch: AttentionBatch, sequences: Sequence[SequenceRows], window: int | None
    ) -> AttentionPlan:
        spec, seen = self.spec, self.seen_keys[window]
        group = spec.num_heads // (1 if spec.latent else _kv_heads(spec, window))
        if batch.pages is not None:
            plain = spec.latent is None and not spec.family.sinks
            return plan_on_device(
                sequences,
                batch.pages,
                seen,
                self.device,
                group=group,
                packed=plain and supports_packed(self.dtype, self.device, spec.head_dim),
                expands=spec.latent is not None,
            )
        if seen.chunked and window is not None:
            sequences, window = [part for seq in sequences for part in seq.chunks(window)], None
        return plan_attention(sequences, window=window, group=0 if spec.latent else group)

    def _query_scale(self, positions_T: Tensor) -> Tensor | None:
        """Return the factor of queries of layers without rope, [T, 1, 1]."""
        if self.spec.query_tuning is None:
            return None
        strength, tokens = self.spec.query_tuning
        steps_T = torch.floor((positions_T.float() + 1.0) / tokens)
        return (torch.log1p(steps_T) * strength + 1.0)[:, None, None]

    def _plan_recurrence(self, batch: AttentionBatch) -> RecurrencePlan | None:
        sizes = self.spec.recurrent
        if sizes is None or not batch.states:
            return None
        call_rows = max(1, _CALL_ELEMENTS // sizes.state_elements)
        return plan_recurrence(batch.sequences, batch.states, call_rows)

    def embed(self, batch: AttentionBatch) -> Tensor:
        """hidden_TD of the batch's tokens, a new tensor."""
        hidden_TD = torch.embedding(self.embedding_VD, batch.token_ids_T)
        scale = self.spec.embedding_scale
        return hidden_TD if scale == 1.0 else hidden_TD.mul_(scale)

    def attend(
        self,
        layer: int,
        hidden_TD: Tensor,
        batch: AttentionBatch,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> AttentionOutput:
        """Run `steps` to its end."""
        return run_to_end(self.steps(layer, hidden_TD, batch, kv, last))

    def steps(
        self,
        layer: int,
        hidden_TD: Tensor,
        batch: AttentionBatch,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> Steps[AttentionOutput]:
        """Run attention (and the dense MLP) of one layer on hidden_TD in place, and return it.

        With `last`, a new tensor of those rows is returned instead. Work between steps may use the
        pool, except blocks that `batch` writes.
        """
        weights, metadata = self._layers[layer], self.prepare(batch)
        attention, hidden_TD = weights.attention, (yield from self.residual(hidden_TD, batch))
        if (
            last is None
            and isinstance(attention, CompiledDecode)
            and attention.decodes
            and decodes_at_once(batch, metadata.plans[self.spec.sliding_windows[layer]])
        ):
            called = attention.decode(hidden_TD, batch, metadata, kv, weights.neighbors)
            x_TD, routed = called
            hidden_TD = self.begin_sum(layer, hidden_TD, batch)
            if routed is not None:
                return AttentionOutput(hidden_TD, routed)
            return (yield from self._feed_forward(weights, hidden_TD, x_TD))
        x_TD = yield from self._norm_tiles(hidden_TD, weights.attention_norm)
        if last is not None:
            self.prepare(last.batch)
            hidden_TD = hidden_TD.index_select(0, last.rows_R)
        yield
        yield from attention.steps(hidden_TD, x_TD, batch, metadata, kv, last)
        yield
        return (yield from self.mlp_steps(layer, hidden_TD, batch if last is None else last.batch))

    def partial_steps(
        self,
        layer: int,
        hidden_TD: Tensor,
        batch: AttentionBatch,
        kv: KvPool,
        last: LastRows | None = None,
    ) -> Steps[Tensor]:
        """Return the output of this half's heads for all rows, or the last ones, a new tensor."""
        weights, metadata = self._layers[layer], self.prepare(batch)
        x_TD = yield from self._norm_tiles(hidden_TD, weights.attention_norm)
        rows = len(hidden_TD)
        if last is not None:
            self.prepare(last.batch)
            rows = len(last.rows_R)
        out_TD = hidden_TD.new_zeros((rows, hidden_TD.shape[1]))
        yield from weights.attention.steps(out_TD, x_TD, batch, metadata, kv, last)
        return out_TD

    def add_attention(self, layer: int, hidden_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Return hidden + y in a new tensor. y_TD: the sum of `partial_steps` over all heads."""
        norm = getattr(self._layers[layer].attention, "out_norm", None)
        if norm is not None:
            once = self.spec.family.norm_rounds_once
            y_TD = rms_norm(y_TD, norm, self.spec.rms_norm_eps, round_once=once)
        return hidden_TD + y_TD

    def mlp_steps(
        self, layer: int, hidden_TD: Tensor, batch: AttentionBatch
    ) -> Steps[AttentionOutput]:
        """Norm rows after attention, then route them or add the dense MLP."""
        weights = self._layers[layer]
        x_TD = yield from self._norm_tiles(hidden_TD, weights.mlp_norm)
        hidden_TD = self.begin_sum(layer, hidden_TD, batch)
        return (yield from self._feed_forward(weights, hidden_TD, x_TD))

    def begin_sum(self, layer: int, hidden_TD: Tensor, batch: AttentionBatch) -> Tensor:
        """Return what the layer's MLP or experts are added to: the residual, or zeros."""
        norm_D = self._layers[layer].mlp_out_norm
        if norm_D is None:
            return hidden_TD
        batch.unjoined = hidden_TD, norm_D
        return torch.zeros_like(hidden_TD)

    def residual(self, hidden_TD: Tensor, batch: AttentionBatch) -> Steps[Tensor]:
        """Return the residual after a layer from the sum that `steps` and the experts made."""
        if batch.unjoined is None:
            return hidden_TD
        (residual_TD, norm_D), batch.unjoined = batch.unjoined, None
        return residual_TD.add_((yield from self._norm_tiles(hidden_TD, norm_D)))

    def _feed_forward(
        self, weights: _Layer, hidden_TD: Tensor, x_TD: Tensor
    ) -> Steps[AttentionOutput]:
        """Route x, or add the dense MLP of x to hidden."""
        yield
        if isinstance(weights.mlp, ExpertRouter):
            return AttentionOutput(hidden_TD, (yield from weights.mlp.steps(x_TD)))
        for tile in row_tiles(x_TD):
            hidden_TD[tile].add_(weights.mlp(x_TD[tile]))
            yield
        return AttentionOutput(hidden_TD, None)

    @property
    def joins_later(self) -> bool:
        """True if a layer's experts are added to the residual at the start of the next one."""
        return any(layer.mlp_out_norm is not None for layer in self._layers)

    def decode_table(self) -> NDArray[np.int64] | None:
        """Return the fields of `attend_layer` of each layer, [L, LAYER_FIELDS].

        None: decode has steps that compiled calls lack.
        """
        rows = [fields for each in self._layers if (fields := each.decode_fields()) is not None]
        return np.stack(rows) if len(rows) == len(self._layers) else None

    def decodes_at_once(self, batch: AttentionBatch) -> bool:
        """Return whether a batch has few sequences with one new token each."""
        return all(decodes_at_once(batch, plan) for plan in self.prepare(batch).plans.values())

    def router(self, layer: int) -> ExpertRouter | None:
        """Return the router of a layer, or None if it is dense."""
        mlp = self._layers[layer].mlp
        return mlp if isinstance(mlp, ExpertRouter) else None

    def mlp_input(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Return the input of the router and the experts of `layer` for a residual."""
        return self._norm(hidden_TD, self._layers[layer].mlp_norm)

    def has_shared(self, layer: int) -> bool:
        return self._layers[layer].shared is not None

    def shared(self, layer: int, x_TD: Tensor) -> Tensor | None:
        """Run `shared_steps` to its end."""
        return run_to_end(self.shared_steps(layer, x_TD))

    def shared_steps(self, layer: int, x_TD: Tensor) -> Steps[Tensor | None]:
        """Return the shared expert's output for the routed x_TD, or None."""
        shared = self._layers[layer].shared
        return None if shared is None else (yield from map_tiles(shared, x_TD))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return [R, V] float32 for the given rows (final norm, head)."""
        x_RD = self._norm(hidden_RD, self._final_norm)
        logits_RV = self._head(x_RD).float()
        return logits_RV if self.spec.logits_scale == 1.0 else logits_RV * self.spec.logits_scale

    def row_logits(
        self, hidden_TD: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, NDArray[np.int64] | None]:
        """Return the logits of rows [R, V] and, on the CPU, the place of each one's largest."""
        is_queued = runs_on_device(hidden_TD.device)
        if self._head_fields is None or is_queued or not hidden_TD.is_contiguous():
            rows_R = torch.tensor(rows, device=hidden_TD.device)
            return self.logits(hidden_TD[rows_R]), None
        numbers_R, best_R = np.array(rows), np.empty(len(rows), np.int64)
        logits_RV = torch.empty((len(rows), self._head.shape[0]))
        fields, chosen, best = (each.ctypes.data for each in (self._head_fields, numbers_R, best_R))
        hidden, logits = hidden_TD.data_ptr(), logits_RV.data_ptr()
        finish_rows(shared_pool(), fields, hidden, chosen, len(rows), logits, best)
        return logits_RV, best_R

    def _norm_tiles(self, hidden_TD: Tensor, weight_D: Tensor) -> Steps[Tensor]:
        return map_tiles(lambda rows: self._norm(rows, weight_D), hidden_TD, LIGHT_ROWS)

    def _norm(self, x: Tensor, weight_D: Tensor) -> Tensor:
        spec = self.spec
        if spec.family.layer_norm:
            return layer_norm(x, weight_D, spec.rms_norm_eps)
        return rms_norm(x, weight_D, spec.rms_norm_eps, round_once=spec.family.norm_rounds_once)


def _kv_heads(spec: ModelSpec, window: int | None) -> int:
    return spec.kv_heads(spec.sliding_windows.index(window))


def _split_keys(spec: ModelSpec, dtype: torch.dtype, window: int | None) -> int:
    if spec.latent is None:
        value = spec.value_dim
        entry = _kv_heads(spec, window) * (spec.head_dim + value)
    else:
        entry, value = spec.latent.entry_dim, spec.latent.kv_rank
    return split_keys(entry * dtype.itemsize, spec.num_heads * value)


def _angles(spec: ModelSpec, rope: RopeSpec, device: torch.device) -> tuple[Tensor, float | Tensor]:
    """Return radians per position of a head's pairs, and the factor of cos and sin.

    Grouped-query attention rotates whole heads; pairs that rope does not rotate have the angle 0.
    """
    inv_freq, factor = inverse_frequencies(rope, spec.rope_dim), rope.attention_factor
    missing = 0 if spec.latent else (spec.head_dim - spec.rope_dim) // 2
    if not missing:
        return inv_freq.to(device), factor
    factors = functional.pad(torch.full_like(inv_freq, factor), (0, missing), value=1.0)
    return functional.pad(inv_freq, (0, missing)).to(device), factors.to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return radians per position of each of the head_dim / 2 rotated pairs, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.divisors)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    raise ValueError(f"rope kind {rope.kind!r} is not known")


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend linearly in between."""
    wavelength = 2 * math.pi / plain
    rotations = rope.original_context_tokens / wavelength
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Keep pairs that rotate often in the original context, divide slow ones (YaRN)."""

    def pair_rotating(times: float) -> float:
        wavelength = rope.original_context_tokens / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_rotating(rope.beta_fast), pair_rotating(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    divide = ((pairs - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * divide + plain * (1 - divide)
