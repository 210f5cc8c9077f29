"""Validated reading of a file of routing counts.

Arrays are checked against the model and against each other, and sizes before anything is read.
Raises CheckpointError: one line.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contracts.errors import CheckpointError
from models.prediction.bounded_counts import TopCounts
from models.prediction.profile_file import MAKE_ONE, checked_tensor
from models.spec.model import ModelSpec
from models.spec.safetensors_file import SafetensorsFile

MAX_OVERSIZE: Final = 16
"""Files may hold this multiple of our default limits."""
_MAX_TOKENS: Final = 1 << 48
_Array = NDArray[Any]


class CountArrays:
    """Arrays of one file for one model of `E` experts, `K` per token."""

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
        self._require(
            ((keys_N >= 0) & (keys_N < vocabulary * self._E)).all(),
            name,
            f"a token id is not one of the vocabulary's {vocabulary}",
        )
        self._require((times_N > 0).all(), name, "a pair was seen less than once")
        self._require((np.diff(keys_N) > 0).all(), name, "pairs are not in ascending order")
        return TopCounts(keys_N, times_N)

    def paths(self, limit: int) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
        """Return [P, 2] token ids and [P, layers, K] experts."""
        layers, vocabulary = len(self._spec.moe_layers), self._spec.vocab_size
        paths_PLK = self._read("paths", "I16", (None, layers, self._K), limit)
        ids_P2 = self._read("path_ids", "I32", (len(paths_PLK), 2))
        self._require(self._are_experts(paths_PLK), "paths", f"not all are of {self._E} experts")
        ordered_PLK = np.sort(paths_PLK, axis=2)
        self._require((np.diff(ordered_PLK, axis=2) > 0).all(), "paths", "an expert appears twice")
        self._require(
            (ids_P2 >= [0, -1]).all() and (ids_P2 < vocabulary).all(),
            "path_ids",
            f"a token id is not one of the vocabulary's {vocabulary}",
        )
        return ids_P2, paths_PLK

    def _are_experts(self, experts: _Array) -> bool:
        return bool(((experts >= 0) & (experts < self._E)).all())

    def _read(self, name: str, dtype: str, shape: tuple[int | None, ...], limit: int = 0) -> _Array:
        return checked_tensor(self._file, name, dtype, shape, limit).numpy()

    def _require(self, holds: bool | np.bool_, name: str, message: str) -> None:
        if not holds:
            raise CheckpointError(f"{self._file.path}: {name}: {message}; {MAKE_ONE}")
