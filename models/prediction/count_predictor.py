"""Probabilities of a token's experts at a layer, from routing counts.

    usual        how often the layer's tokens go there
    token        ... tokens of that id (Speculative MoE, Section 3.1: p(j | i) = n(i, j) / n(i))
    two tokens   ... of that id after the previous one
    previous     ... tokens with the same experts a layer earlier
    two layers   ... in both layers before
    both         token and previous, as if independent: p(j | i) p(j | S) / p(j)
    surer        token or two layers (or previous), whichever has the likelier K (Algorithm 2)

Each estimate adds `_PRIOR` counts of the estimate with less knowledge: two tokens of token, two
layers of previous, previous of single experts of S, these of the usual. No product module imports
this yet: token shuffling (s-TS) will.

Shapes: T tokens, E experts; P tokens of the sample of paths; W distinct conditions.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.prediction.bounded_counts import RoutingPaths
from models.prediction.routing_counts import RoutingCounts

MARGINAL, TOKEN, TWO_TOKENS = "usual", "token", "two tokens"
PREVIOUS, TWO_LAYERS, BOTH, MORE_CONFIDENT = "previous", "two layers", "both", "surer"
_PRIOR: Final = 1.0

Probabilities = NDArray[np.float64]
"""[T, E], summing to K for each token."""
_Keys = NDArray[Any]


class ConditionalCounts(NamedTuple):
    """Counts by condition: n_WE per expert, n_W tokens; of_T: condition of each token."""

    n_WE: NDArray[np.float64]
    n_W: NDArray[np.float64]
    of_T: NDArray[np.int64]

    def probabilities(self, prior_TE: Probabilities) -> Probabilities:
        n_TE, n_T1 = self.n_WE[self.of_T], self.n_W[self.of_T, None]
        chances_TE: Probabilities = (n_TE + _PRIOR * prior_TE) / (n_T1 + _PRIOR)
        return chances_TE


class CountPredictor:
    """Predictor of one layer. nearest: source of counts for token ids without any."""

    def __init__(
        self, counts: RoutingCounts, layer: int, nearest: NearestTokens | None = None
    ) -> None:
        self._experts, self._paths = counts.num_experts, counts.paths
        self._position = list(counts.layers).index(layer)
        self._top_k = counts.paths.paths_PLK.shape[2]
        self._pairs, self._nearest = counts.layers[layer].pairs, nearest
        self._marginal_E = counts.layers[layer].load_E / max(1, counts.counted)

    def predict(self, tokens: RoutingPaths) -> dict[str, Probabilities]:
        """Return probabilities by estimate; those of previous layers only if there are any."""
        marginal_TE = np.broadcast_to(self._marginal_E, (len(tokens.ids_P2), self._experts))
        token_TE = self._of_ids(tokens.ids_P2[:, 0]).probabilities(marginal_TE)
        two = self._of_sample(_two(self._paths.ids_P2), _two(tokens.ids_P2))
        found = {MARGINAL: marginal_TE, TOKEN: token_TE, TWO_TOKENS: two.probabilities(token_TE)}
        if self._position == 0:
            return found
        before_PK, before_TK = (_sets(each, self._position - 1) for each in (self._paths, tokens))
        sets = self._of_sample(_keys_of_sets(before_PK), _keys_of_sets(before_TK))
        found[PREVIOUS] = sets.probabilities(self._of_singles(before_PK, before_TK))
        best_TE = found[PREVIOUS]
        if self._position > 1:
            best_TE = found[TWO_LAYERS] = self._of_two_layers(tokens, best_TE)
        found[BOTH] = token_TE * found[PREVIOUS] / (self._marginal_E + 1e-9)
        found[BOTH] *= self._top_k / np.maximum(found[BOTH].sum(1, keepdims=True), 1e-9)
        found[MORE_CONFIDENT] = more_confident(token_TE, best_TE, self._top_k)
        return found

    def _of_two_layers(self, tokens: RoutingPaths, previous_TE: Probabilities) -> Probabilities:
        rows = [
            np.concatenate([_sets(each, self._position - n) for n in (1, 2)], axis=1)
            for each in (self._paths, tokens)
        ]
        return self._of_sample(*map(_keys_of_sets, rows)).probabilities(previous_TE)

    def _of_ids(self, ids_T: NDArray[np.int32]) -> ConditionalCounts:
        ids_W, of_T = np.unique(ids_T.astype(np.int64), return_inverse=True)
        ids_N, experts_N = np.divmod(self._pairs.keys, self._experts)
        if self._nearest is not None:
            ids_W, at_W = np.unique(
                self._nearest.profiled(ids_W, np.unique(ids_N)), return_inverse=True
            )
            of_T = at_W[of_T]
        n_WE = np.zeros((len(ids_W), self._experts))
        at_N = np.searchsorted(ids_W, ids_N).clip(max=len(ids_W) - 1)
        same = np.flatnonzero(ids_W[at_N] == ids_N)
        n_WE[at_N[same], experts_N[same]] = self._pairs.times[same]
        return ConditionalCounts(n_WE, n_WE.sum(1) / self._top_k, of_T)

    def _of_sample(self, keys_P: _Keys, keys_T: _Keys) -> ConditionalCounts:
        """Count this layer's experts of the sample's tokens by key."""
        keys_W, of_T = np.unique(keys_T, return_inverse=True)
        at_P = np.searchsorted(keys_W, keys_P).clip(max=len(keys_W) - 1)
        same = np.flatnonzero(keys_W[at_P] == keys_P)
        experts_PK = self._paths.paths_PLK[same, self._position].astype(np.int64)
        cells = (at_P[same, None] * self._experts + experts_PK).ravel()
        shape = (len(keys_W), self._experts)
        n_WE = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape).astype(float)
        return ConditionalCounts(n_WE, n_WE.sum(1) / self._top_k, of_T)

    def _of_singles(
        self, before_PK: NDArray[np.int16], before_TK: NDArray[np.int16]
    ) -> Probabilities:
        """Return the mean of the estimates from each single expert of the previous layer."""
        E, now_PK = self._experts, self._paths.paths_PLK[:, self._position]
        cells = before_PK[:, :, None].astype(np.int64) * E + now_PK[:, None, :]
        n_EE = np.bincount(cells.ravel(), minlength=E * E).reshape(E, E)
        n_E1 = n_EE.sum(1, keepdims=True) / self._top_k
        chances_EE = (n_EE + _PRIOR * self._marginal_E) / (n_E1 + _PRIOR)
        chances_TE: Probabilities = chances_EE[before_TK].mean(1)
        return chances_TE


def more_confident(one_TE: Probabilities, other_TE: Probabilities, top_k: int) -> Probabilities:
    """Return for each token the probabilities with the larger top `top_k`; the first of equals."""
    one_T, other_T = (
        np.partition(each, -top_k, axis=1)[:, -top_k:].sum(1) for each in (one_TE, other_TE)
    )
    return np.where((one_T >= other_T)[:, None], one_TE, other_TE)


def _sets(paths: RoutingPaths, position: int) -> NDArray[np.int16]:
    return np.sort(paths.paths_PLK[:, position], axis=1)


def _keys_of_sets(sets_NK: NDArray[np.int16]) -> _Keys:
    """Return a key for each ascending row of experts."""
    return np.ascontiguousarray(sets_NK, ">u2").view(f"S{2 * sets_NK.shape[1]}").ravel()


def _two(ids_P2: NDArray[np.int32]) -> NDArray[np.int64]:
    return (ids_P2[:, 1].astype(np.int64) << 32) + ids_P2[:, 0]


_AT_ONCE: Final = 256  # unseen ids; bounds the similarity matrix


class NearestTokens:
    """Nearest ids by cosine of embeddings (Speculative MoE, Section 3.3); of equals the lowest."""

    def __init__(self, embedding_VD: Tensor) -> None:
        self._embedding_VD = embedding_VD

    def profiled(self, ids_W: NDArray[Any], profiled_N: NDArray[Any]) -> NDArray[np.int64]:
        """Return each id if it is in profiled_N (ascending), otherwise the nearest that is."""
        found_W = ids_W.astype(np.int64)
        unseen = np.flatnonzero(~np.isin(found_W, profiled_N))
        if len(unseen) == 0 or len(profiled_N) == 0:
            return found_W
        known_ND = self._directions(profiled_N)
        for start in range(0, len(unseen), _AT_ONCE):
            batch = unseen[start : start + _AT_ONCE]
            nearest = (self._directions(found_W[batch]) @ known_ND.T).argmax(1)
            found_W[batch] = profiled_N[nearest.numpy()]
        return found_W

    def _directions(self, ids: NDArray[Any]) -> Tensor:
        rows = self._embedding_VD[torch.from_numpy(ids.astype(np.int64))]
        return functional.normalize(rows.float(), dim=-1)
