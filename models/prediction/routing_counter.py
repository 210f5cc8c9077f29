"""Counting of routing during a profile's runs, or of samples of serving ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.prediction.bounded_counts import BoundedCounts, PathSample
from models.prediction.routing_counts import (
    COUNT_LIMITS,
    CountLimits,
    LayerCounts,
    RoutingCounts,
    TopCounts,
    keys_of_sets,
)

_AT_ONCE = 4096  # tokens, to bound the copies of a batch


class CountedModel(NamedTuple):
    """The counted model: fingerprints of its folder, and sizes."""

    checkpoint: bytes
    tokenizer: bytes
    moe_layers: Sequence[int]
    num_experts: int
    top_k: int
    vocab_size: int


class _Layer:
    def __init__(self, experts: int, top_k: int, limits: CountLimits) -> None:
        self.together_EE = np.zeros((experts, experts), np.int64)
        self.sets = BoundedCounts(limits.sets, np.dtype(f"S{2 * top_k}"))
        self.pairs = BoundedCounts(limits.pairs, np.int64)

    def add(self, ids_T: NDArray[np.int64], experts_TK: NDArray[np.int64]) -> None:
        E = len(self.together_EE)
        both = experts_TK[:, :, None] * E + experts_TK[:, None, :]
        self.together_EE += np.bincount(both.ravel(), minlength=E * E).reshape(E, E)
        self.sets.add(keys_of_sets(np.sort(experts_TK, axis=1).astype(np.int16)))
        self.pairs.add((ids_T[:, None] * E + experts_TK).ravel())

    def counted(self) -> LayerCounts:
        return LayerCounts(
            self.together_EE.copy(),
            TopCounts(*self.sets.counted()),
            TopCounts(*self.pairs.counted()),
        )


class RoutingCounter:
    """Counts in bounded memory (`CountLimits`). Single-threaded."""

    def __init__(
        self, model: CountedModel, limits: CountLimits = COUNT_LIMITS, *, seed: int = 0
    ) -> None:
        self._model = model
        self._layers = {
            layer: _Layer(model.num_experts, model.top_k, limits) for layer in model.moe_layers
        }
        self._paths = PathSample(limits.paths, len(model.moe_layers), model.top_k, seed)
        self.tokens = 0

    def add(self, ids_T2: NDArray[Any], paths_TLK: NDArray[Any]) -> None:
        """Count tokens [id, previous id or -1] with their paths.

        Raises ValueError if impossible.
        """
        for name, wrong in self._wrong(ids_T2, paths_TLK):
            if wrong:
                raise ValueError(f"routing to count: {name}")
        for start in range(0, len(ids_T2), _AT_ONCE):
            ids, paths = ids_T2[start : start + _AT_ONCE], paths_TLK[start : start + _AT_ONCE]
            ids_T = ids[:, 0].astype(np.int64)
            for position, layer in enumerate(self._layers.values()):
                layer.add(ids_T, paths[:, position].astype(np.int64))
            self._paths.add(ids.astype(np.int32), paths.astype(np.int16))
            self.tokens += len(ids)

    def _wrong(self, ids_T2: NDArray[Any], paths_TLK: NDArray[Any]) -> Iterator[tuple[str, bool]]:
        model = self._model
        shape = (len(ids_T2), len(model.moe_layers), model.top_k)
        yield f"paths of shape {paths_TLK.shape}, not {shape}", paths_TLK.shape != shape
        yield f"ids of shape {ids_T2.shape}", ids_T2.shape[1:] != (2,)
        if len(ids_T2) == 0:
            return
        low, high = ids_T2.min(0).tolist(), int(ids_T2.max())
        beyond = low[0] < 0 or low[1] < -1 or high >= model.vocab_size
        yield f"token ids {low} to {high}, of a vocabulary of {model.vocab_size}", beyond
        first, last = int(paths_TLK.min()), int(paths_TLK.max())
        beyond = first < 0 or last >= model.num_experts
        yield f"experts {first} to {last} of {model.num_experts}", beyond
        ordered_TLK = np.sort(paths_TLK, axis=2)
        yield "an expert twice", bool((ordered_TLK[:, :, 1:] == ordered_TLK[:, :, :-1]).any())

    def counts(self) -> RoutingCounts:
        """Return the current counts as new arrays."""
        model = self._model
        layers = {layer: each.counted() for layer, each in self._layers.items()}
        return RoutingCounts(
            model.checkpoint, model.tokenizer, self.tokens, layers, self._paths.sample()
        )
