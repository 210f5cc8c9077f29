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
    checked_tensor,
    checkpoint_digest,
    open_profile,
    write_arrays,
)
from models.spec.checkpoint_files import SafetensorsFile
from models.spec.model import ModelSpec
from models.text.tokenizer_files import tokenizer_digest

MIN_TOKENS: Final = 1000
"""Minimum of a useful profile."""
MAX_OVERSIZE: Final = 16
"""Files may hold this multiple of our default limits."""
_MAX_TOKENS: Final = 1 << 48
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
        arrays = _CountArrays(file, spec)
        counted = arrays.counted(_COUNTED)
        if counted < min_tokens:
            raise CheckpointError(
                f"{path}: a routing profile of {counted} tokens; at least {min_tokens} are needed"
            )
        most_pairs = COUNT_LIMITS.pairs * MAX_OVERSIZE
        layers = {
            layer: LayerCounts(arrays.load(layer, counted), arrays.pairs(layer, most_pairs))
            for layer in spec.moe_layers
        }
        paths = arrays.paths(COUNT_LIMITS.paths * MAX_OVERSIZE)
        return RoutingCounts(
            checkpoint_digest(folder), tokenizer_digest(folder), counted, layers, paths
        )


class _CountArrays:
    """Arrays of one file, checked against a model of `E` experts, `K` per token."""

    def __init__(self, file: SafetensorsFile, spec: ModelSpec) -> None:
        self._file, self._spec = file, spec
        self._E, self._K = spec.num_experts, spec.top_k

    def counted(self, name: str) -> int:
        counted = int(self._read(name, "I64", (1,))[0])
        self._require(0 < counted <= _MAX_TOKENS, name, f"{counted} is not a token count")
        return counted

    def load(self, layer: int, counted: int) -> NDArray[np.int64]:
        """Return [E] tokens of each expert."""
        name = f"load.{layer}"
        load_E: NDArray[np.int64] = self._read(name, "I64", (self._E,))
        self._require((load_E >= 0).all(), name, "a count is negative")
        self._require(
            (load_E <= counted).all() and int(load_E.sum()) == counted * self._K,
            name,
            f"{counted} tokens have {counted * self._K} experts, counted are "
            f"{load_E.tolist()[:4]}…",
        )
        return load_E

    def pairs(self, layer: int, limit: int) -> TopCounts:
        """Return counts by token id * E + expert."""
        name, vocabulary = f"pairs.{layer}", self._spec.vocab_size
        keys_N, times_N = self._read(name, "I32", (None, 2), limit).astype(np.int64).T
        are_pairs = (keys_N >= 0) & (keys_N < vocabulary * self._E)
        self._require(are_pairs.all(), name, self._not_in(vocabulary))
        self._require((times_N > 0).all(), name, "a pair was seen less than once")
        self._require((np.diff(keys_N) > 0).all(), name, "pairs are not in ascending order")
        return TopCounts(keys_N, times_N)

    def paths(self, limit: int) -> RoutingPaths:
        layers, vocabulary = len(self._spec.moe_layers), self._spec.vocab_size
        paths_PLK = self._read("paths", "I16", (None, layers, self._K), limit)
        ids_P2 = self._read("path_ids", "I32", (len(paths_PLK), 2))
        are_experts = (paths_PLK >= 0) & (paths_PLK < self._E)
        self._require(are_experts.all(), "paths", f"not all are of {self._E} experts")
        ordered_PLK = np.sort(paths_PLK, axis=2)
        self._require((np.diff(ordered_PLK, axis=2) > 0).all(), "paths", "an expert appears twice")
        are_ids = (ids_P2 >= [0, -1]) & (ids_P2 < vocabulary)
        self._require(are_ids.all(), "path_ids", self._not_in(vocabulary))
        return RoutingPaths(ids_P2, paths_PLK)

    def _not_in(self, vocabulary: int) -> str:
        return f"a token id is not one of the vocabulary's {vocabulary}"

    def _read(
        self, name: str, dtype: str, shape: tuple[int | None, ...], limit: int = 0
    ) -> NDArray[Any]:
        return checked_tensor(self._file, name, dtype, shape, limit).numpy()

    def _require(self, holds: bool | np.bool_, name: str, message: str) -> None:
        if not holds:
            raise CheckpointError(f"{self._file.path}: {name}: {message}; {MAKE_ONE}")


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
