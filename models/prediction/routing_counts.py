"""Counts of tokens by expert and layer, from which placements are solved.

    counted       [1] int64         tokens that were counted
    load.L        [E] int64         tokens that went to each expert of layer L
    pairs.L       [N, 2] int32      token id * E + expert, ascending, and count
    paths         [P, layers, K] int16   a sample of tokens: experts in each router's order
    path_ids      [P, 2] int32      their token ids and previous ones (-1: none)
    checkpoint, tokenizer  [32] uint8    fingerprints of the model folder

N and P are bounded (`CountLimits`), and the least frequent entries dropped. Counts can be merged.
Source: Speculative MoE, Section 3.1 and Appendix A (token activation profiles).

Pairs are counted in bounded memory with Misra and Gries' counters, by batches:

    more than `limit` keys   ──> the (limit + 1)th largest count is subtracted from all of them,
                                 and keys without a rest are dropped

No count is too large, and none is short by more than the subtracted total, which is at most
occurrences / (limit + 1): more frequent keys are always present (Agarwal et al., "Mergeable
Summaries", 2012). Paths are a uniform sample of a stream of unknown length (Vitter's Algorithm R).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contracts.errors import CheckpointError
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

Counts = NDArray[np.int64]


class TopCounts(NamedTuple):
    """Unique keys in ascending order, and their counts."""

    keys: Counts
    times: Counts

    def add(self, other: TopCounts) -> TopCounts:
        keys, where = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        times = np.zeros(len(keys), np.int64)
        np.add.at(times, where, np.concatenate([self.times, other.times]))
        return TopCounts(keys, times)

    def truncate(self, limit: int) -> TopCounts:
        if len(self.keys) <= limit:
            return self
        rest = self.times - np.partition(self.times, -limit - 1)[-limit - 1]
        return TopCounts(self.keys[rest > 0], rest[rest > 0])


class BoundedCounts:
    """Counts of integer keys: at most 2 * limit, and `limit` pending ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._top = TopCounts(np.empty(0, np.int64), np.empty(0, np.int64))
        self._waiting: list[Counts] = []
        self._room = limit

    def add(self, keys_N: Counts) -> None:
        """Count each key once more."""
        while len(keys_N):
            now, keys_N = keys_N[: self._room], keys_N[self._room :]
            self._waiting.append(now)
            self._room -= len(now)
            if self._room == 0:
                self._count()

    def _count(self) -> None:
        if self._waiting:
            keys, times = np.unique(np.concatenate(self._waiting), return_counts=True)
            self._waiting, self._room = [], self._limit
            self._top = self._top.add(TopCounts(keys, times))
        if len(self._top.keys) > 2 * self._limit:
            self._top = self._top.truncate(self._limit)

    def counted(self) -> TopCounts:
        """Return at most `limit` counts."""
        self._count()
        return self._top.truncate(self._limit)


_MAX_EXACT: Final = 10**9  # numpy's bound of the hypergeometric distribution; above, binomial


class RoutingPaths(NamedTuple):
    ids_P2: NDArray[np.int32]
    paths_PLK: NDArray[np.int16]


class PathSample:
    """A sample of at most `limit` tokens, which depends on tokens and seed, not on batches."""

    def __init__(self, limit: int, layers: int, top_k: int, seed: int) -> None:
        self._seen, self._random = 0, np.random.default_rng(seed)
        self._paths = RoutingPaths(
            np.empty((limit, 2), np.int32), np.empty((limit, layers, top_k), np.int16)
        )

    def add(self, ids_T2: NDArray[np.int32], paths_TLK: NDArray[np.int16]) -> None:
        """Add tokens in order. The arrays are copied."""
        limit, places_T = len(self._paths.ids_P2), np.arange(len(ids_T2)) + self._seen
        self._seen += len(ids_T2)
        late = places_T >= limit
        draws = self._random.random(np.count_nonzero(late))
        places_T[late] = draws * (places_T[late] + 1)
        kept = np.flatnonzero(places_T < limit)
        self._paths.ids_P2[places_T[kept]] = ids_T2[kept]  # the last of equal places counts
        self._paths.paths_PLK[places_T[kept]] = paths_TLK[kept]

    def sample(self) -> RoutingPaths:
        """Return the sample as new arrays."""
        ids_P2, paths_PLK = self._paths
        return RoutingPaths(ids_P2[: self._seen].copy(), paths_PLK[: self._seen].copy())


def subsample(paths: RoutingPaths, limit: int) -> RoutingPaths:
    """Return at most `limit` paths, in order."""
    if len(paths.ids_P2) <= limit:
        return paths
    random = np.random.default_rng(len(paths.ids_P2))
    which = np.sort(random.choice(len(paths.ids_P2), limit, replace=False))
    return RoutingPaths(paths.ids_P2[which], paths.paths_PLK[which])


def merge_samples(
    one: RoutingPaths, seen: int, other: RoutingPaths, other_seen: int, limit: int
) -> RoutingPaths:
    """Merge two samples of `seen` and `other_seen` tokens into one of all tokens."""
    limit = min([limit, *(  # limited by the sparser sample
        len(paths.ids_P2) * (seen + other_seen) // count
        for paths, count in ((one, seen), (other, other_seen))
        if count
    )])  # fmt: skip
    random = np.random.default_rng([seen, other_seen])
    if max(seen, other_seen) < _MAX_EXACT // 2:
        of_one = int(random.hypergeometric(seen, other_seen, min(limit, seen + other_seen)))
    else:
        of_one = int(random.binomial(limit, seen / (seen + other_seen)))
    of_one = max(min(of_one, len(one.ids_P2)), limit - len(other.ids_P2))
    one, other = subsample(one, of_one), subsample(other, limit - of_one)
    return RoutingPaths(
        np.concatenate([one.ids_P2, other.ids_P2]), np.concatenate([one.paths_PLK, other.paths_PLK])
    )


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


class RoutingCounter:
    """Counts in bounded memory (`CountLimits`). Single-threaded."""

    def __init__(self, folder: Path, spec: ModelSpec, limits: CountLimits = COUNT_LIMITS) -> None:
        """Set up a counter of the model in `folder`. Raises CheckpointError."""
        self._spec = spec
        self._digests = checkpoint_digest(folder), tokenizer_digest(folder)
        self._loads = {layer: np.zeros(spec.num_experts, np.int64) for layer in spec.moe_layers}
        self._pairs = {layer: BoundedCounts(limits.pairs) for layer in spec.moe_layers}
        self._paths = PathSample(limits.paths, len(spec.moe_layers), spec.top_k, seed=0)
        self.tokens = 0

    def add(self, ids_T2: NDArray[Any], paths_TLK: NDArray[Any]) -> None:
        """Count tokens [id, previous id or -1] with their paths, which the caller has checked."""
        E = self._spec.num_experts
        for start in range(0, len(ids_T2), _AT_ONCE):
            ids, paths = ids_T2[start : start + _AT_ONCE], paths_TLK[start : start + _AT_ONCE]
            ids_T = ids[:, 0].astype(np.int64)
            for position, layer in enumerate(self._spec.moe_layers):
                experts_TK = paths[:, position].astype(np.int64)
                self._loads[layer] += np.bincount(experts_TK.ravel(), minlength=E)
                self._pairs[layer].add((ids_T[:, None] * E + experts_TK).ravel())
            self._paths.add(ids.astype(np.int32), paths.astype(np.int16))
            self.tokens += len(ids)

    def counts(self) -> RoutingCounts:
        """Return the current counts as new arrays."""
        layers = {
            layer: LayerCounts(load_E.copy(), self._pairs[layer].counted())
            for layer, load_E in self._loads.items()
        }
        return RoutingCounts(*self._digests, self.tokens, layers, self._paths.sample())
