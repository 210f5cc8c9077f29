"""Counts of tokens by expert and layer, from which placements are solved.

    counted       [1] int64         tokens that were counted
    load.L        [E] int64         tokens that went to each expert of layer L
    pairs.L       [N, 2] int32      token id * E + expert, ascending, and count
    paths         [P, layers, K] int16   a sample of tokens: experts in each router's order
    path_ids      [P, 2] int32      their token ids and previous ones (-1: none)
    checkpoint, tokenizer  [32] uint8    fingerprints of the model folder

N and P are bounded (`CountLimits`), and the least frequent entries dropped. Counts can be merged.
Source: Speculative MoE, Section 3.1 and Appendix A (token activation profiles).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contracts.errors import CheckpointError
from models.prediction import count_checks as checks
from models.prediction.bounded_counts import (
    BoundedCounts,
    PathSample,
    RoutingPaths,
    TopCounts,
    merge_samples,
    subsample,
)
from models.prediction.profile_file import (
    CHECKPOINT,
    MAKE_ONE,
    check_fingerprint,
    checkpoint_digest,
    open_profile,
    write_arrays,
)
from models.spec.model import ModelSpec
from models.text.tokenizer_files import tokenizer_digest

MIN_TOKENS: Final = 1000
"""Minimum of a useful profile."""
_COUNTED, _TOKENIZER = "counted", "tokenizer"
_MAX_TIMES: Final = (1 << 31) - 1  # of a pair in a file; larger counts are clipped


class CountLimits(NamedTuple):
    """Limits of pairs per layer, and of paths."""

    pairs: int = 65_536
    paths: int = 8192


COUNT_LIMITS: Final = CountLimits()


class LayerCounts(NamedTuple):
    """load_E: tokens of each expert. pairs: counts by token id * E + expert."""

    load_E: NDArray[np.int64]
    pairs: TopCounts


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingCounts:
    """Counts of `counted` tokens. layers: MoE layers, ascending."""

    checkpoint: bytes
    tokenizer: bytes
    counted: int
    layers: Mapping[int, LayerCounts]
    paths: RoutingPaths

    @property
    def num_experts(self) -> int:
        return len(next(iter(self.layers.values())).load_E)

    def merge(self, other: RoutingCounts, limits: CountLimits = COUNT_LIMITS) -> RoutingCounts:
        """Return the sum, exact below the limits. Raises CheckpointError for another model."""
        for name, is_same in (
            ("checkpoint", self.checkpoint == other.checkpoint),
            ("tokenizer", self.tokenizer == other.tokenizer),
        ):
            if not is_same:
                raise CheckpointError(
                    f"routing counts of two {name}s cannot be merged: give profiles of one {name}"
                )
        sample = merge_samples(self.paths, self.counted, other.paths, other.counted, limits.paths)
        layers = {
            layer: LayerCounts(
                one.load_E + other.layers[layer].load_E,
                one.pairs.add(other.layers[layer].pairs).truncate(limits.pairs),
            )
            for layer, one in self.layers.items()
        }
        return dataclasses.replace(
            self, counted=self.counted + other.counted, layers=layers, paths=sample
        )

    def truncate(self, limits: CountLimits) -> RoutingCounts:
        """Drop the least frequent entries."""
        layers = {
            layer: LayerCounts(one.load_E, one.pairs.truncate(limits.pairs))
            for layer, one in self.layers.items()
        }
        return dataclasses.replace(self, layers=layers, paths=subsample(self.paths, limits.paths))

    def write(self, path: Path) -> None:
        """Write a file of counts alone. Raises CheckpointError."""
        write_arrays(path, self.arrays())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the file format."""
        arrays: dict[str, NDArray[Any]] = {_COUNTED: np.array([self.counted], np.int64)}
        for layer, layer_counts in self.layers.items():
            times = layer_counts.pairs.times.clip(max=_MAX_TIMES)
            arrays |= {
                f"load.{layer}": layer_counts.load_E,
                f"pairs.{layer}": np.stack([layer_counts.pairs.keys, times], 1).astype(np.int32),
            }
        return arrays | {
            "paths": self.paths.paths_PLK,
            "path_ids": self.paths.ids_P2,
            CHECKPOINT: np.frombuffer(self.checkpoint, np.uint8),
            _TOKENIZER: np.frombuffer(self.tokenizer, np.uint8),
        }

    @staticmethod
    def read(
        path: Path, folder: Path, spec: ModelSpec, *, min_tokens: int = MIN_TOKENS
    ) -> RoutingCounts:
        """Read counts of `folder`. Raises CheckpointError, also for fewer than `min_tokens`."""
        file = open_profile(path, folder)
        if _COUNTED not in file.entries:
            raise CheckpointError(
                f"{path}: a routing profile without counts, which placement needs; {MAKE_ONE}"
            )
        check_fingerprint(file, _TOKENIZER, tokenizer_digest(folder), folder)
        arrays = checks.CountArrays(file, spec)
        counted = arrays.counted(_COUNTED)
        if counted < min_tokens:
            raise CheckpointError(
                f"{path}: a routing profile of {counted} tokens; at least {min_tokens} are needed"
            )
        most_pairs = COUNT_LIMITS.pairs * checks.MAX_OVERSIZE
        layers = {
            layer: LayerCounts(arrays.load(layer, counted), arrays.pairs(layer, most_pairs))
            for layer in spec.moe_layers
        }
        ids_P2, paths_PLK = arrays.paths(COUNT_LIMITS.paths * checks.MAX_OVERSIZE)
        return RoutingCounts(
            checkpoint_digest(folder),
            tokenizer_digest(folder),
            counted,
            layers,
            RoutingPaths(ids_P2, paths_PLK),
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
    def __init__(self, experts: int, limits: CountLimits) -> None:
        self.load_E = np.zeros(experts, np.int64)
        self.pairs = BoundedCounts(limits.pairs)

    def add(self, ids_T: NDArray[np.int64], experts_TK: NDArray[np.int64]) -> None:
        E = len(self.load_E)
        self.load_E += np.bincount(experts_TK.ravel(), minlength=E)
        self.pairs.add((ids_T[:, None] * E + experts_TK).ravel())


class RoutingCounter:
    """Counts in bounded memory (`CountLimits`). Single-threaded."""

    def __init__(self, model: CountedModel, limits: CountLimits = COUNT_LIMITS) -> None:
        self._model = model
        self._layers = {layer: _Layer(model.num_experts, limits) for layer in model.moe_layers}
        self._paths = PathSample(limits.paths, len(model.moe_layers), model.top_k, seed=0)
        self.tokens = 0

    def add(self, ids_T2: NDArray[Any], paths_TLK: NDArray[Any]) -> None:
        """Count tokens [id, previous id or -1] with their paths, which the caller has checked."""
        for start in range(0, len(ids_T2), _AT_ONCE):
            ids, paths = ids_T2[start : start + _AT_ONCE], paths_TLK[start : start + _AT_ONCE]
            ids_T = ids[:, 0].astype(np.int64)
            for position, layer in enumerate(self._layers.values()):
                layer.add(ids_T, paths[:, position].astype(np.int64))
            self._paths.add(ids.astype(np.int32), paths.astype(np.int16))
            self.tokens += len(ids)

    def counts(self) -> RoutingCounts:
        """Return the current counts as new arrays."""
        model = self._model
        layers = {
            layer: LayerCounts(each.load_E.copy(), each.pairs.counted())
            for layer, each in self._layers.items()
        }
        return RoutingCounts(
            model.checkpoint, model.tokenizer, self.tokens, layers, self._paths.sample()
        )
